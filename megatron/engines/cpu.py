"""The CPU engine: O(length) memory in forward and backward, fp32 inside, exact pruning by decay.

Runs the compiled C++ implementation where there is a compiler, the PyTorch one elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.engines.call import OPERANDS, Call, Gradients, check_first_key, checked_call
from megatron.engines.cpp_build import load_library
from megatron.engines.cpu_compiled import CompiledBackend
from megatron.engines.cpu_torch import TorchBackend
from megatron.engines.pruning import DecayBounds, TileCount, decay_bounds

__all__ = ["tiled_attention", "tiled_forward_with_count"]


class Backend(Protocol):
    """What C++ and PyTorch have in common; calls come in fp32.

    `lse` is the logsumexp of each row, in a form that only the same backend understands.
    """

    def forward(
        self, call: Call, bounds: DecayBounds | None
    ) -> tuple[Tensor, Tensor, TileCount]: ...

    def backward(
        self,
        call: Call,
        bounds: DecayBounds | None,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        wanted: frozenset[str],
    ) -> Gradients: ...


def tiled_attention(call: Call) -> Tensor:
    if torch.compiler.is_compiling():
        from megatron.engines.cpu_compile import compiled_attention

        return compiled_attention(call)
    check_first_key(call)
    return _Tiled.apply(call, *call.operands())


def tiled_forward_with_count(*tensors: Tensor | None, **options: Any) -> tuple[Tensor, TileCount]:
    """`attention` without gradients, and how many tiles the pruning left to visit."""
    call = checked_call(*tensors, **options)  # type: ignore[arg-type]
    check_first_key(call)
    out, _, count = current_backend().forward(call.in_fp32(), bounds_of(call))
    return out.to(call.q.dtype), count


def bounds_of(call: Call) -> DecayBounds | None:
    return decay_bounds(call) if call.pruning else None


def current_backend() -> Backend:
    library = load_library()
    return _torch_backend() if library is None else _compiled_backend(library)


@functools.cache
def _compiled_backend(library: Any) -> Backend:
    return CompiledBackend(library)


@functools.cache
def _torch_backend() -> Backend:
    return TorchBackend()


def run_forward(call: Call, bounds: DecayBounds | None, backend: Backend) -> tuple[Tensor, Tensor]:
    """The output in the call's dtype, and the logsumexp of its rows."""
    out, lse, _ = backend.forward(call.in_fp32(), bounds)
    return out.to(call.q.dtype), lse


def run_backward(
    call: Call,
    bounds: DecayBounds | None,
    backend: Backend,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of the call's operands that are needed, in their dtypes and shapes."""
    wanted = frozenset(name for name, needs in zip(OPERANDS, needed, strict=True) if needs)
    grads = backend.backward(call.in_fp32(), bounds, out.float(), lse, grad_out.float(), wanted)
    found = (getattr(grads, name) for name in OPERANDS)
    return [_fitted(g, x) for g, x in zip(found, call.operands(), strict=True)]


class _Tiled(torch.autograd.Function):
    """The call's tensors are passed beside it, for autograd to see them."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor | None) -> Tensor:
        bounds, backend = bounds_of(call), current_backend()
        out, lse = run_forward(call, bounds, backend)
        ctx.save_for_backward(*tensors, call.first_key, out, lse)
        ctx.window, ctx.scale, ctx.bounds, ctx.backend = call.window, call.scale, bounds, backend
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, weight, key_bias, sink, first_key, out, lse = ctx.saved_tensors
        call = Call(q, k, v, bias, weight, ctx.window, ctx.scale, key_bias, first_key, sink)
        needed = ctx.needs_input_grad[1:]
        return None, *run_backward(call, ctx.bounds, ctx.backend, out, lse, grad_out, needed)


def _fitted(grad: Tensor | None, operand: Tensor | None) -> Tensor | None:
    """A gradient in the operand's dtype and shape: which may be longer (a table), or broadcast."""
    if grad is None or operand is None:
        return None
    if operand.dim() == 2:
        grad = torch.nn.functional.pad(grad, (0, operand.shape[1] - grad.shape[1]))
    elif operand.dim() == 1:
        grad = grad.sum((0, 2))
    return grad.sum_to_size(operand.shape).to(operand.dtype)
