"""The dense engine: all scores at once, through the fused softmax.

Runs on any device and in any precision and is the only engine with attention dropout; needs
O(Lq * Lk) memory. The others are tested against it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.engines.call import Call, check_first_key, key_origin
from megatron.engines.distance import dense_matrix, sum_by_distance

__all__ = ["fused_softmax", "naive_attention"]


def naive_attention(call: Call) -> Tensor:
    if call.q.device.type == "cpu" and not torch.compiler.is_compiling():
        check_first_key(call)
    batch, heads, q_len, _ = call.q.shape
    # All queries of a key head are rows of one product: k and v are not copied for each head.
    pairs = batch * call.k.shape[1]
    # The scale goes into the product, before it is rounded: unscaled fp16 scores may overflow.
    scores = torch.baddbmm(
        call.q.new_empty(1, 1, 1),
        call.q.reshape(pairs, -1, call.q.shape[3]),
        call.k.flatten(0, 1).transpose(-2, -1),
        beta=0.0,
        alpha=call.scale,
    )
    probs = fused_softmax(
        scores.view(batch, heads, q_len, -1),
        call.bias,
        call.weight,
        key_bias=call.key_bias,
        first_key=call.first_key,
        sink=call.sink,
        window=call.window,
        dropout=call.dropout,
        generator=call.generator,
    )
    if heads == call.k.shape[1]:
        return probs @ call.v
    return (probs.view(pairs, -1, call.k_len) @ call.v.flatten(0, 1)).view_as(call.q)


# Scale + distance tables + causal mask + window + softmax in one function.
#
# Shared by ALiBi, T5, KERPLE and every other positional embedding that is a table over distance.
# Inputs and outputs may be bf16 or fp16; everything inside is fp32 (float64 stays float64). On GPU
# the work is one Triton kernel; elsewhere it is one pass of torch operations with its own backward,
# so that only the probabilities are kept (and the scores, if a weight table multiplies them).
#
# Shapes: scores, probabilities [B, H, Lq, Lk]; tables [H, >= Lk], entry d for distance d.


def fused_softmax(
    scores: Tensor,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    key_bias: Tensor | None = None,
    first_key: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float = 1.0,
    window: int | None = None,
    q_offset: int | None = None,
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Softmax over the keys of `scores * scale * weight[d] + bias[d]`, d = distance to the key.

    The query in row i stands at position `q_offset + i` (default: the queries are the last
    positions, `q_offset = Lk - Lq`) and sees the keys at distance 0 .. window-1. key_bias,
    first_key and sink are those of `attention`.
    """
    q_len, k_len = scores.shape[-2:]
    if q_offset is None:
        q_offset = k_len - q_len
    _check_rows_see_a_key(q_len, k_len, window, q_offset)
    for name, table in (("bias", bias), ("weight", weight)):
        if table is not None and table.shape[-1] < q_offset + q_len:
            raise ValueError(
                f"{name} table has {table.shape[-1]} distances, the scores need"
                f" {q_offset + q_len}: compute the table for that length"
            )
    plain = key_bias is None and first_key is None and sink is None
    triton_softmax = _triton_softmax(scores, bias, weight) if scores.is_cuda and plain else None
    if triton_softmax is not None:
        probs = triton_softmax(scores, bias, weight, scale=scale, window=window, q_offset=q_offset)
    else:
        probs = _FusedSoftmax.apply(
            scores, bias, weight, key_bias, sink, first_key, scale, window, q_offset
        )
    return _dropout(probs, dropout, generator) if dropout > 0.0 else probs


def _check_rows_see_a_key(q_len: int, k_len: int, window: int | None, q_offset: int) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window={window}: must be at least 1, so that a query sees itself")
    if q_offset < 0 or q_offset + q_len > k_len:
        raise ValueError(
            f"q_offset={q_offset} with {q_len} queries and {k_len} keys: every query needs the key"
            f" at its own position; use 0 <= q_offset <= {k_len - q_len}"
        )


def _triton_softmax(
    scores: Tensor, bias: Tensor | None, weight: Tensor | None
) -> Callable[..., Tensor] | None:
    """The Triton kernel, where there is Triton and it takes these tensors."""
    try:
        from megatron.engines.triton_softmax import can_run_softmax, triton_fused_softmax
    except ImportError:  # a GPU build of torch without triton
        return None
    return triton_fused_softmax if can_run_softmax(scores, bias, weight) is None else None


def _dropout(probs: Tensor, dropout: float, generator: torch.Generator | None) -> Tensor:
    if generator is None:
        return torch.nn.functional.dropout(probs, dropout)
    kept = torch.empty_like(probs).bernoulli_(1.0 - dropout, generator=generator)
    return probs * kept.div_(1.0 - dropout)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _hide_invisible(
    logits: Tensor, window: int | None, q_offset: int, first_key: Tensor | None
) -> None:
    """-inf in place for keys in the future, beyond the window, and before the first key."""
    q_len, k_len = logits.shape[-2:]
    ones = torch.ones(q_len, k_len, dtype=torch.bool, device=logits.device)
    hidden = ones.triu(q_offset + 1)
    if window is not None:
        hidden |= ones.tril(q_offset - window)
    if first_key is not None:
        position = torch.arange(k_len, device=logits.device)
        hidden = hidden | (position < first_key[:, None, :, None])
    logits.masked_fill_(hidden, -torch.inf)


def _softmax_with_sink(logits: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """The probabilities of the keys, and of the sink, [B, H, Lq, 1]."""
    lse = torch.logaddexp(logits.logsumexp(-1, keepdim=True), sink)
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    return logits.sub_(lse).exp_(), (sink - lse).exp()


class _FusedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        bias: Tensor | None,
        weight: Tensor | None,
        key_bias: Tensor | None,
        sink: Tensor | None,
        first_key: Tensor | None,
        scale: float,
        window: int | None,
        q_offset: int,
    ) -> Tensor:
        q_len = scores.shape[-2]
        visible = q_offset + q_len  # later keys are in every query's future
        dtype = _compute_dtype(scores.dtype)
        logits = scores.to(dtype) * scale
        seen = logits[..., :visible]
        if weight is not None:
            seen.mul_(dense_matrix(weight.to(dtype), q_len, visible, 0.0))
        if bias is not None:
            seen.add_(dense_matrix(bias.to(dtype), q_len, visible, 0.0))
        origin: Tensor | None = None
        if key_bias is not None:
            keys = key_bias[..., :visible].to(dtype)
            origin = key_origin(keys, q_len)[..., None]
            seen.add_(keys[:, :, None] - origin)
        _hide_invisible(logits, window, q_offset, first_key)
        sink_probs = None
        if sink is not None:
            rows = sink.to(dtype)[..., None]
            rows = rows[:, None] if sink.dim() == 1 else rows
            probs, sink_probs = _softmax_with_sink(
                logits, rows if origin is None else rows - origin
            )
        else:
            probs = torch.softmax(logits, dim=-1)
            if key_bias is not None:  # a row of -inf alone
                probs.masked_fill_(logits.amax(-1, keepdim=True) == -torch.inf, 0.0)
        probs = probs.to(scores.dtype)
        needs_scores = weight is not None and ctx.needs_input_grad[2]
        saved_scores = scores if needs_scores else None
        ctx.save_for_backward(probs, weight, saved_scores, bias, key_bias, sink, sink_probs)
        ctx.scale, ctx.visible = scale, visible
        return probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_probs: Tensor) -> tuple[Tensor | None, ...]:
        probs_saved, weight, scores, bias, key_bias, sink, sink_probs = ctx.saved_tensors
        dtype = _compute_dtype(probs_saved.dtype)
        q_len, visible = probs_saved.shape[-2], ctx.visible
        probs = probs_saved[..., :visible].to(dtype)
        grad_logits = grad_probs[..., :visible].to(dtype) * probs
        expected = grad_logits.sum(-1, keepdim=True)
        grad_logits.sub_(probs * expected)
        del probs
        grad_bias = grad_weight = grad_scores = grad_key_bias = grad_sink = None
        if bias is not None and ctx.needs_input_grad[1]:
            grad_bias = _table_gradient(grad_logits.sum(0), bias)
        if key_bias is not None and ctx.needs_input_grad[3]:
            grad_key_bias = torch.zeros_like(key_bias)
            by_key = grad_logits.sum(-2)
            grad_key_bias[..., :visible] = by_key.sum_to_size(grad_key_bias[..., :visible].shape)
        if sink is not None and ctx.needs_input_grad[4]:
            grad_rows = (-sink_probs * expected)[..., 0]
            grad_rows = grad_rows.sum((0, 2)) if sink.dim() == 1 else grad_rows
            grad_sink = grad_rows.to(sink.dtype)
        if scores is not None:
            product = (grad_logits * scores[..., :visible]).sum(0)
            grad_weight = _table_gradient(product.mul_(ctx.scale), weight)
        if ctx.needs_input_grad[0]:
            if weight is not None:
                grad_logits.mul_(dense_matrix(weight.to(dtype), q_len, visible, 0.0))
            grad_scores = torch.zeros_like(probs_saved)
            grad_scores[..., :visible] = grad_logits.mul_(ctx.scale)
        return grad_scores, grad_bias, grad_weight, grad_key_bias, grad_sink, *[None] * 4


def _table_gradient(grad_matrix: Tensor, table: Tensor) -> Tensor:
    """Gradient of a table of any length from the gradient of its matrix."""
    by_distance = sum_by_distance(grad_matrix)
    grad = torch.zeros_like(table)
    grad[:, : by_distance.shape[1]] = by_distance
    return grad
