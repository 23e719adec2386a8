"""The CPU engine: O(length) memory in forward and backward, fp32 inside, exact pruning by decay.

Runs the compiled C++ implementation where there is a compiler, the PyTorch one elsewhere. Their
logsumexp of the output's rows is in a form that only the same one understands. Under
`torch.compile` a call is one node of the graph, a torch operator. Operators take tensors and
numbers only and always return tensors: a gradient that nobody needs is empty. Eager calls go
another way, which costs less for each call.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.engines.call import OPERANDS, Call, check_values, checked_call, rows_apart
from megatron.engines.cpp_build import load_library
from megatron.engines.cpu_compiled import CompiledBackend
from megatron.engines.cpu_torch import TorchBackend
from megatron.engines.pruning import DecayBounds, TileCount, decay_bounds

Backend = CompiledBackend | TorchBackend


def tiled_attention(call: Call) -> Tensor:
    if torch.compiler.is_compiling():
        out, _ = _forward_operator(*call.operands(), call.window, call.scale, call.pruning)
        return out
    return _Tiled.apply(call, *call.operands())


def tiled_forward_with_count(*tensors: Tensor, **options: Any) -> tuple[Tensor, TileCount]:
    """`attention` without gradients, and how many tiles the pruning left to visit."""
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
    return call.fitted(backend.backward(call, bounds, made, wanted))


class _Tiled(torch.autograd.Function):
    """The call's tensors are passed beside it, for autograd to see them."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor | None) -> Tensor:
        ctx.bounds, ctx.backend = _bounds_of(call), _current_backend()
        out, lse, _ = ctx.backend.forward(call, ctx.bounds)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.settings = (call.window, call.scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        call, needed = Call(*tensors, *ctx.settings), ctx.needs_input_grad[1:]
        return None, *_backward(call, ctx.bounds, ctx.backend, (out, lse, grad), needed)


# The same as operators, for torch.compile.

_TENSORS = ", ".join(f"Tensor{'' if name in 'qkv' else '?'} {name}" for name in OPERANDS)
_SETTINGS = "SymInt? window, float scale, bool pruning"
_FORWARD = f"({_TENSORS}, {_SETTINGS}) -> (Tensor, Tensor)"
_MADE = "Tensor out, Tensor lse, Tensor grad"
_BACKWARD = f"({_MADE}, bool[] needed, {_TENSORS}, {_SETTINGS}) -> Tensor[]"
# Compiled code on disk is found by an operator's name: another version's must have another name.
_VERSION = hashlib.sha256((_FORWARD + _BACKWARD).encode()).hexdigest()[:8]


@torch.library.custom_op(f"kerple::tiled_attention_{_VERSION}", mutates_args=(), schema=_FORWARD)
def _forward_operator(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = _call_of(arguments)
    check_values(call)
    out, lse, _ = _current_backend().forward(call, _bounds_of(call))
    return _laid_out(out), lse


def _call_of(arguments: Sequence[Any]) -> Call:
    """From the operands and the settings of an operator."""
    *operands, window, scale, pruning = arguments
    return replace(Call(*operands), window=window, scale=scale, pruning=pruning)


@_forward_operator.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return rows_apart(q.shape, q.dtype, q.device), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op(
    f"kerple::tiled_attention_backward_{_VERSION}", mutates_args=(), schema=_BACKWARD
)
def _backward_operator(
    out: Tensor, lse: Tensor, grad: Tensor, needed: Sequence[bool], *arguments: Any
) -> list[Tensor]:
    call = _call_of(arguments)
    grads = _backward(call, _bounds_of(call), _current_backend(), (out, lse, grad), needed)
    return [
        out.new_empty(0) if grad is None or not needs else _laid_out(grad)
        for grad, needs in zip(grads, needed, strict=True)
    ]


@_backward_operator.register_fake
def _(out: Tensor, _lse: Any, _grad: Any, needed: Sequence[bool], *others: Any) -> list[Tensor]:
    return [
        out.new_empty(0)
        if x is None or not needs
        else (rows_apart(x.shape, x.dtype, x.device) if x.dim() == 4 else x.new_empty(x.shape))
        for x, needs in zip(others[: len(OPERANDS)], needed, strict=True)
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[: len(OPERANDS)])
    ctx.settings = inputs[len(OPERANDS) :]


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    out, lse, *operands = ctx.saved_tensors
    needed = [bool(needs) for needs in ctx.needs_input_grad[: len(OPERANDS)]]
    grads = _backward_operator(out, lse, grad, needed, *operands, *ctx.settings)
    wanted = [grad if needs else None for grad, needs in zip(grads, needed, strict=True)]
    return *wanted, *(None for _ in ctx.settings)


_forward_operator.register_autograd(_differentiate, setup_context=_save)


def _laid_out(x: Tensor) -> Tensor:
    """As the fake operators promise."""
    if x.dim() != 4:
        return x.contiguous()
    expected = rows_apart(x.shape, x.dtype, x.device)
    return x if x.stride() == expected.stride() else expected.copy_(x)
