"""Keys and values of the tokens already seen, for generation."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """One layer's keys and values, [batch, heads, length, head_dim], in buffers that double."""

    def __init__(self) -> None:
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the newest tokens; returns all keys and values, oldest first."""
        end = self.length + k.shape[2]
        self._keys = self._grown(self._keys, k, end)
        self._values = self._grown(self._values, v, end)
        self._keys[:, :, self.length : end] = k
        self._values[:, :, self.length : end] = v
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def _grown(self, buffer: Tensor | None, like: Tensor, end: int) -> Tensor:
        if buffer is not None and buffer.shape[2] >= end:
            return buffer
        capacity = max(end, 2 * self.length, 64)
        batch, heads, _, head_dim = like.shape
        grown = like.new_empty(batch, heads, capacity, head_dim)
        if buffer is not None:
            grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        if self._keys is not None and self._values is not None:
            self._keys = self._keys.index_select(0, rows)
            self._values = self._values.index_select(0, rows)


class Cache:
    """The caches of all layers of a model."""

    def __init__(self, num_layers: int) -> None:
        self.layers = [LayerCache() for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """How many tokens have been seen."""
        return self.layers[0].length if self.layers else 0

    @torch.no_grad()
    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        for layer in self.layers:
            layer.select(rows)
