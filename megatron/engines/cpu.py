"""The CPU engine: O(length) memory in forward and backward, fp32 inside, exact pruning by decay.

Runs the compiled C++ implementation where there is a compiler, the PyTorch one elsewhere. Each
stores the logsumexp in a form of its own, so forward and backward must use the same one. Under
`torch.compile` a call is one node of the graph (operators.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.engines.call import OPERANDS, Call, checked_call
from megatron.engines.cpp_build import load_library
from megatron.engines.cpu_compiled import CompiledBackend
from megatron.engines.cpu_torch import TorchBackend
from megatron.engines.operators import graph_operator
from megatron.engines.pruning import DecayBounds, TileCount, decay_bounds

Backend = CompiledBackend | TorchBackend


def tiled_attention(call: Call) -> Tensor:
    if torch.compiler.is_compiling():
        return _operator(call)
    return _Tiled.apply(call, *call.operands())


def tiled_forward_with_count(*tensors: Tensor, **options: Any) -> tuple[Tensor, TileCount]:
    """`attention` without gradients, and how many tiles were computed after pruning."""
    call = checked_call(*tensors, **options)
    out, _, count = _current_backend().forward(call, _bounds_of(call))
    return out, count


def _bounds_of(call: Call) -> DecayBounds | None:
    return decay_bounds(call) if call.pruning else None


def _current_backend() -> Backend:
    library = load_library()
    return _TORCH if library is None else _compiled_backend(library)


_TORCH = TorchBackend()
_compiled_backend = functools.cache(CompiledBackend)


def _backward(
    call: Call, bounds: DecayBounds | None, backend: Backend, made: Sequence[Tensor], needed: Any
) -> list[Tensor | None]:
    """The gradients of the operands that are needed, in their dtypes and shapes."""
    wanted = {name for name, needs in zip(OPERANDS, needed, strict=True) if needs}
    return call.match_operands(backend.backward(call, bounds, made, wanted))


class _Tiled(torch.autograd.Function):
    """The call's tensors are also passed as arguments, so that autograd tracks them."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor | None) -> Tensor:
        ctx.bounds, ctx.backend = _bounds_of(call), _current_backend()
        out, lse, _ = ctx.backend.forward(call, ctx.bounds)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.settings = (call.window, call.scale, call.dropout)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        call, needed = Call(*tensors, *ctx.settings), ctx.needs_input_grad[1:]
        return None, *_backward(call, ctx.bounds, ctx.backend, (out, lse, grad), needed)


def _operator_forward(call: Call) -> tuple[Tensor, Tensor]:
    out, lse, _ = _current_backend().forward(call, _bounds_of(call))
    return out, lse


def _operator_backward(
    call: Call, made: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    return _backward(call, _bounds_of(call), _current_backend(), made, needed)


_operator = graph_operator(
    "tiled_attention", _operator_forward, _operator_backward, lambda q: q.shape[:3]
)
