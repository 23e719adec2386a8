"""An engine as one node of torch.compile's graph: a torch operator, and one for its gradients.

Operators take tensors and numbers only and always return tensors: a gradient that is not needed is
an empty tensor. Eager calls use an autograd.Function instead, which has less overhead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.engines.call import OPERANDS, Call, check_values, empty_blhd

Forward = Callable[[Call], tuple[Tensor, Tensor]]
"""The output and its logsumexp."""
Backward = Callable[[Call, Sequence[Tensor], Sequence[bool]], list[Tensor | None]]
"""The gradients of the operands that are needed, from the output, its logsumexp and gradient."""

_TENSORS = ", ".join(f"Tensor{'' if name in 'qkv' else '?'} {name}" for name in OPERANDS)
_SETTINGS = "SymInt? window, float scale, float dropout, bool pruning"
_FORWARD = f"({_TENSORS}, {_SETTINGS}) -> (Tensor, Tensor)"
_MADE = "Tensor out, Tensor lse, Tensor grad"
_BACKWARD = f"({_MADE}, bool[] needed, {_TENSORS}, {_SETTINGS}) -> Tensor[]"
# torch caches compiled code by the operator's name: another schema needs another name.
_VERSION = hashlib.sha256((_FORWARD + _BACKWARD).encode()).hexdigest()[:8]


def graph_operator(
    name: str, forward: Forward, backward: Backward, lse_shape: Callable[[Tensor], Sequence[int]]
) -> Callable[[Call], Tensor]:
    """Attention as the operator kerple::NAME_VERSION; `lse_shape` of q."""
    made = f"kerple::{name}"
    differentiate = _backward_operator(f"{made}_backward_{_VERSION}", backward)

    @torch.library.custom_op(f"{made}_{_VERSION}", mutates_args=(), schema=_FORWARD)
    def operator(*arguments: Any) -> tuple[Tensor, Tensor]:
        call = _call_of(arguments)
        check_values(call)
        out, lse = forward(call)
        return _in_declared_layout(out), lse

    @operator.register_fake
    def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return empty_blhd(q.shape, q.dtype, q.device), q.new_empty(
            lse_shape(q), dtype=torch.float32
        )

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output, *inputs[: len(OPERANDS)])
        ctx.settings = inputs[len(OPERANDS) :]

    def gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        out, lse, *operands = ctx.saved_tensors
        needed = [bool(needs) for needs in ctx.needs_input_grad[: len(OPERANDS)]]
        grads = differentiate(out, lse, grad, needed, *operands, *ctx.settings)
        wanted = [grad if needs else None for grad, needs in zip(grads, needed, strict=True)]
        return *wanted, *(None for _ in ctx.settings)

    operator.register_autograd(gradients, setup_context=save)

    def attend(call: Call) -> Tensor:
        out, _ = operator(*call.operands(), call.window, call.scale, call.dropout, call.pruning)
        return out

    return attend


def _backward_operator(name: str, backward: Backward) -> Any:
    @torch.library.custom_op(name, mutates_args=(), schema=_BACKWARD)
    def operator(
        out: Tensor, lse: Tensor, grad: Tensor, needed: Sequence[bool], *arguments: Any
    ) -> list[Tensor]:
        grads = backward(_call_of(arguments), (out, lse, grad), needed)
        return [
            out.new_empty(0) if grad is None or not needs else _in_declared_layout(grad)
            for grad, needs in zip(grads, needed, strict=True)
        ]

    @operator.register_fake
    def _(out: Tensor, _lse: Any, _grad: Any, needed: Sequence[bool], *others: Any) -> list[Tensor]:
        return [
            out.new_empty(0)
            if x is None or not needs
            else (empty_blhd(x.shape, x.dtype, x.device) if x.dim() == 4 else x.new_empty(x.shape))
            for x, needs in zip(others[: len(OPERANDS)], needed, strict=True)
        ]

    return operator


def _call_of(arguments: Sequence[Any]) -> Call:
    """From the operands and the settings of an operator."""
    *operands, window, scale, dropout, pruning = arguments
    settings = {"window": window, "scale": scale, "dropout": dropout, "pruning": pruning}
    return replace(Call(*operands), **settings)


def _in_declared_layout(x: Tensor) -> Tensor:
    """In the memory order that the fake operators declare."""
    if x.dim() != 4:
        return x.contiguous()
    expected = empty_blhd(x.shape, x.dtype, x.device)
    return x if x.stride() == expected.stride() else expected.copy_(x)
