"""Keys and values of the tokens already seen, for generation.

Rows of a batch may be of different lengths: their newest tokens stand side by side, and `starts`
tells where each row begins. What lies before a row's start is never seen.

    slots    0 1 2 3 4        starts
    row 0    a b c d e        0
    row 1    . . . f g        3
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def row_starts(starts_B: Tensor | None, tokens: int) -> Tensor | None:
    """Where the row of each of so many new tokens begins, [B, tokens]."""
    return None if starts_B is None else starts_B[:, None].expand(-1, tokens)


class LayerCache:
    """One layer's keys and values, [batch, heads, length, head_dim], and the sums of its gates.

    With a `window`, the latest `window` tokens are kept, in buffers for at most twice as many.
    Buffers double when they are full.
    """

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self.length = 0  # tokens seen
        self.starts: Tensor | None = None
        self._capacity = self._end = 0  # tokens that a buffer holds, and where the newest ends
        self._buffers: dict[str, Tensor] = {}

    @property
    def kept(self) -> int:
        """How many of the tokens seen have their keys here."""
        return self.length if self.window is None else min(self.length, self.window)

    @property
    def num_bytes(self) -> int:
        """What the buffers take."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the newest tokens; returns the keys and values kept, and theirs, oldest first."""
        keys, values = self._extended("keys", k), self._extended("values", v)
        self.length += k.shape[2]
        self._end += k.shape[2]
        if self.window is not None and self._capacity > max(2 * self.window, 64):  # a long prompt
            self._move(self.window)
        return keys, values

    def append_gates(self, sums: Tensor) -> Tensor:
        """Add the newest tokens' sums [batch, heads, new], before their keys; returns all kept."""
        return self._extended("gates", sums[..., None])[..., 0]

    @property
    def gate_sum(self) -> Tensor | None:
        """The sum of the gates of all tokens seen, [batch, heads]; None before the first."""
        gates = self._buffers.get("gates")
        return None if gates is None else gates[:, :, self._end - 1, 0]

    def _extended(self, name: str, new: Tensor) -> Tensor:
        batch, heads, count, width = new.shape
        if self._end + count > self._capacity:
            most = max(2 * self.kept, 64)
            if self.window is not None:
                most = min(most, 2 * self.window)
            self._move(max(self.kept + count, most))
        if name not in self._buffers:
            self._buffers[name] = new.new_empty(batch, heads, self._capacity, width)
        end = self._end + count
        self._buffers[name][:, :, self._end : end] = new
        return self._buffers[name][:, :, self._end - self.kept : end]

    def _move(self, capacity: int) -> None:
        """New buffers for so many tokens, which begin with those kept."""
        for name, old in self._buffers.items():
            kept = old[:, :, self._end - self.kept : self._end]
            new = old.new_empty(*old.shape[:2], capacity, old.shape[3])
            new[:, :, : self.kept] = kept
            self._buffers[name] = new
        self._capacity, self._end = capacity, self.kept

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        for name, buffer in self._buffers.items():
            self._buffers[name] = buffer.index_select(0, rows)

    def begin_later(self, slots: int) -> None:
        """Forget the first slots, where no row has a token."""
        self.length -= slots

    def join(self, parts: Sequence[tuple[LayerCache, Sequence[int]]], lengths: list[int]) -> None:
        """Take the rows of others: row `rows[i]` is row i of the part, its first tokens.

        `lengths` are the numbers of tokens of all rows. A part may hold more than a row's tokens
        (padding), and must still hold the last `window` of them.
        """
        self.length = self._capacity = max(lengths)
        if self.window is not None:
            self._capacity = max(self.kept, min(self.length, 64))
        for name, like in parts[0][0]._buffers.items():
            # zeros: a key that is not seen must still be a number
            shape = (len(lengths), like.shape[1], self._capacity, like.shape[3])
            self._buffers[name] = like.new_zeros(shape)
            for part, rows in parts:
                for place, row in enumerate(rows):
                    count = min(lengths[row], self.kept)
                    end = part._end - (part.length - lengths[row])
                    kept = part._buffers[name][place, :, end - count : end]
                    self._buffers[name][row, :, self.kept - count : self.kept] = kept
        self._end = self.kept


class Cache:
    """The caches of all layers of a model, by their windows."""

    def __init__(self, windows: Sequence[int | None]) -> None:
        self.layers = [LayerCache(window) for window in windows]

    @property
    def length(self) -> int:
        """How many tokens have been seen; of the longest row, where rows differ."""
        return self.layers[0].length if self.layers else 0

    @property
    def starts(self) -> Tensor | None:
        """Where each row begins, [batch]; None where all begin at 0."""
        return self.layers[0].starts if self.layers else None

    @property
    def num_bytes(self) -> int:
        """What all layers' buffers take."""
        return sum(layer.num_bytes for layer in self.layers)

    @torch.no_grad()
    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may be taken several times."""
        for layer in self.layers:
            layer.select(rows)
        if self.starts is None:
            return
        starts = self.starts.index_select(0, rows)
        first = int(starts.min())
        for layer in self.layers:
            layer.begin_later(first)
        self._set_starts(starts - first)

    @torch.no_grad()
    def join(
        self, parts: Sequence[tuple[Cache, Sequence[int]]], lengths: list[int], device: torch.device
    ) -> None:
        """Take the rows of other caches, see `LayerCache.join`, with their ends side by side."""
        for number, layer in enumerate(self.layers):
            layer.join([(part.layers[number], rows) for part, rows in parts], lengths)
            for part, _ in parts:
                part.layers[number] = LayerCache()  # its memory is free again
        self._set_starts(torch.tensor([max(lengths) - length for length in lengths], device=device))

    def _set_starts(self, starts: Tensor) -> None:
        for layer in self.layers:
            layer.starts = starts if bool(starts.any()) else None
