"""Weights that are read one at a time: a conversion needs the memory of one weight, not of all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor


class LazyWeights(Mapping[str, Tensor]):
    """Weights by name, each made anew when it is read.

    `outlines` are tensors on device meta: shapes and precisions are known before.
    """

    def __init__(self, outlines: Mapping[str, Tensor], make: Callable[[str], Tensor]) -> None:
        self.outlines, self._make = dict(outlines), make

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.outlines:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.outlines)

    def __len__(self) -> int:
        return len(self.outlines)


def outlines(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Shape and precision of each weight, on device meta; nothing is read."""
    if isinstance(weights, LazyWeights):
        return weights.outlines
    return {name: torch.empty_like(whole, device="meta") for name, whole in weights.items()}


def changed(weights: Mapping[str, Tensor], change: Callable[[str, Tensor], Tensor]) -> LazyWeights:
    """The weights after `change(name, weight)`, which is made when they are read."""
    shapes = {name: change(name, outline) for name, outline in outlines(weights).items()}
    return LazyWeights(shapes, lambda name: change(name, weights[name]))


def by_layer(
    weights: Mapping[str, Tensor], read: Callable[[int], Mapping[str, Tensor]]
) -> LazyWeights:
    """Weights that are read again with their layer's file, of which one is kept at a time.

    What a layer's file does not have under its name, a shared kernel, is kept as it is.
    """
    kept = {name: whole for name, whole in weights.items() if name.startswith("1.")}
    layer: dict[int, Mapping[str, Tensor]] = {}

    def make(name: str) -> Tensor:
        index = int(name.partition(".")[0])
        if name in kept:
            return kept[name]
        if index not in layer:
            layer.clear()
            layer[index] = read(index)
        return layer[index][name]

    return LazyWeights(outlines(weights), make)


def replaced(
    weights: Mapping[str, Tensor], new: Mapping[str, Tensor], dropped: Collection[str] = ()
) -> Mapping[str, Tensor]:
    """The weights with some others in their places, and without those that are `dropped`."""
    if not new and not dropped:
        return weights
    shapes = {name: each for name, each in outlines(weights).items() if name not in dropped}
    shapes |= outlines(new)
    return LazyWeights(shapes, lambda name: new[name] if name in new else weights[name])
