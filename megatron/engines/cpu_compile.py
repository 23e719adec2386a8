"""The CPU engine as torch operators, for `torch.compile`: a call is one node of the graph.

Operators take tensors and numbers only and always return tensors: a gradient that nobody needs is
empty. Eager calls go another way (`cpu.py`), which costs less for each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.engines.call import Call, check_first_key
from megatron.engines.cpu import bounds_of, current_backend, run_backward, run_forward

__all__ = ["compiled_attention"]


def compiled_attention(call: Call) -> Tensor:
    out, _ = _forward(*call.operands(), call.first_key, call.window, call.scale, call.pruning)
    return out


def _rows_apart(x: Tensor) -> Tensor:
    """New memory for [B, H, L, D] laid out as [B, L, H, D]: what both backends promise here."""
    batch, heads, length, dim = x.shape
    return x.new_empty(batch, length, heads, dim).transpose(1, 2)


def _laid_out(x: Tensor) -> Tensor:
    expected = _rows_apart(x) if x.stride() != _strides(x) else x
    return x if expected is x else expected.copy_(x)


def _strides(x: Tensor) -> tuple[int, ...]:
    _, heads, length, dim = x.shape
    return length * heads * dim, dim, heads * dim, 1


@torch.library.custom_op("kerple::tiled_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    key_bias: Tensor | None,
    sink: Tensor | None,
    first_key: Tensor | None,
    window: int | None,
    scale: float,
    pruning: bool,
) -> tuple[Tensor, Tensor]:
    call = Call(q, k, v, bias, weight, window, scale, key_bias, first_key, sink, pruning=pruning)
    check_first_key(call)
    out, lse = run_forward(call, bounds_of(call), current_backend())
    return _laid_out(out), lse


@_forward.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _rows_apart(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("kerple::tiled_attention_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    key_bias: Tensor | None,
    sink: Tensor | None,
    first_key: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    needed: Sequence[bool],
    window: int | None,
    scale: float,
    pruning: bool,
) -> list[Tensor]:
    call = Call(q, k, v, bias, weight, window, scale, key_bias, first_key, sink, pruning=pruning)
    grads = run_backward(call, bounds_of(call), current_backend(), out, lse, grad_out, needed)
    return [
        q.new_empty(0) if grad is None or not needs else _settled(grad)
        for grad, needs in zip(grads, needed, strict=True)
    ]


def _settled(grad: Tensor) -> Tensor:
    return _laid_out(grad) if grad.dim() == 4 else grad.contiguous()


@_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    operands, needed = arguments[:7], arguments[11]
    return [
        arguments[0].new_empty(0)
        if x is None or not needs
        else (_rows_apart(x) if x.dim() == 4 else x.new_empty(x.shape))
        for x, needs in zip(operands, needed, strict=True)
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:8], *output)
    ctx.settings = inputs[8:]


def _differentiate(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    needed = [bool(needs) for needs in ctx.needs_input_grad[:7]]
    grads = _backward(*saved, grad_out, needed, *ctx.settings)
    wanted = [grad if needs else None for grad, needs in zip(grads, needed, strict=True)]
    return *wanted, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
