"""One attention call, from the check of its arguments to the engine that runs it.

Shapes: B batch, H heads, L length (q: Lq, k and v: Lk), D head dim. Every engine takes the same
`Call` and may rely on what is checked here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron.errors import EngineError

__all__ = ["OPERANDS", "Call", "Gradients", "checked_call"]

# The tensors of a call, in the order in which engines pass them to autograd.
OPERANDS = ("q", "k", "v", "bias", "weight")


@dataclass(frozen=True)
class Call:
    """A checked attention call. Shapes and meaning as in `attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    weight: Tensor | None
    window: int | None  # None where it would hide nothing
    scale: float
    dropout: float = 0.0
    pruning: bool = True
    generator: torch.Generator | None = None

    @property
    def q_len(self) -> int:
        return self.q.shape[2]

    @property
    def k_len(self) -> int:
        return self.k.shape[2]

    @property
    def reach(self) -> int:
        """How many of the nearest keys a query may see: the window, or all."""
        return self.k_len if self.window is None else self.window

    def operands(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, name) for name in OPERANDS)

    def in_fp32(self) -> Call:
        """The same call with fp32 tensors outside of autograd."""
        tensors = zip(OPERANDS, self.operands(), strict=True)
        in_fp32: dict[str, Any] = {n: x.detach().float() for n, x in tensors if x is not None}
        return replace(self, **in_fp32)


@dataclass(frozen=True)
class Gradients:
    """The gradients of a call, in fp32; those of tables cover the distances 0 .. Lk-1."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    weight: Tensor | None


def checked_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    pruning: bool = True,
    generator: torch.Generator | None = None,
) -> Call:
    """The call, if its arguments fit together; `EngineError` with the fix otherwise."""
    _check_qkv(q, k, v)
    for name, table in (("bias", bias), ("weight", weight)):
        if table is not None:
            _check_table(name, table, q, k.shape[2])
    if window is not None and window < 1:
        raise EngineError(f"window={window}: must be at least 1, so that a query sees itself")
    if not 0.0 <= dropout < 1.0:
        raise EngineError(f"dropout={dropout}: must be at least 0 and below 1")
    if window is not None and window >= k.shape[2]:
        window = None
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    if not math.isfinite(scale):
        raise EngineError(f"scale={scale}: must be a finite number")
    return Call(q, k, v, bias, weight, window, float(scale), dropout, pruning, generator)


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise EngineError(f"q, k, v must be [batch, heads, length, head_dim]; got {shapes}")
    if k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise EngineError(
            f"q, k, v must agree in batch, heads and head_dim, and k, v in length; got {shapes}"
        )
    if q.shape[2] > k.shape[2]:
        raise EngineError(
            f"more queries than keys ({shapes}): the queries are the last positions, so k and v"
            " must hold at least as many"
        )
    if 0 in q.shape:
        raise EngineError(f"q, k, v must not be empty; got {shapes}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise EngineError(
            f"q, k, v must share one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if not q.device == k.device == v.device:
        raise EngineError(f"q, k, v must be on one device; got {q.device}, {k.device}, {v.device}")


def _check_table(name: str, table: Tensor, q: Tensor, k_len: int) -> None:
    heads = q.shape[1]
    if table.dim() != 2 or table.shape[0] != heads or table.shape[1] < k_len:
        raise EngineError(
            f"{name} must be a table [heads={heads}, at least {k_len} distances]; got"
            f" {tuple(table.shape)}: compute the table for the length of the keys"
        )
    if not table.is_floating_point() or table.device != q.device:
        raise EngineError(
            f"{name} must be a floating table on {q.device}; got {table.dtype} on {table.device}"
        )
