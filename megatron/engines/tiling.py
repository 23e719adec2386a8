"""What the two implementations of the tiled engine, C++ and PyTorch, share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron.engines.pruning import DecayBounds, TileCount

__all__ = ["Backend", "Gradients", "Inputs", "Saved"]


@dataclass(frozen=True)
class Inputs:
    """An attention call in fp32, detached. Shapes as in `dispatch`."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    weight: Tensor | None
    window: int | None
    scale: float
    needs_bias_grad: bool = False
    needs_weight_grad: bool = False


@dataclass(frozen=True)
class Saved:
    """The output, and the logsumexp of each row in a form that the same backend understands."""

    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Gradients:
    """The tables' gradients cover the distances 0 .. Lk-1."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    weight: Tensor | None


class Backend(Protocol):
    def forward(self, inputs: Inputs, bounds: DecayBounds | None) -> tuple[Saved, TileCount]: ...

    def backward(
        self, inputs: Inputs, bounds: DecayBounds | None, saved: Saved, grad_out: Tensor
    ) -> Gradients: ...
