"""The dense engine: all scores at once, through the fused softmax.

Runs on any device and in any precision; needs O(Lq * Lk) memory. The others are tested against it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.engines.call import Call, key_origin, match_operand
from megatron.engines.dropout import kept, kept_scale, row_keys


def naive_attention(call: Call, added: Tensor | None = None) -> Tensor:
    """Attention with all scores at once; `added` is one more term of them, [B or 1, H, Lq, Lk]."""
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
        *(call.bias, call.weight),
        key_bias=call.key_bias,
        first_key=call.first_key,
        sink=call.sink,
        added=_dense_features(call) if added is None else added,
        row_scale=call.row_scale,
        window=call.window,
    )
    if call.dropout > 0.0:
        mask = kept(row_keys(call), 0, call.k_len, call.dropout)
        probs = (probs * kept_scale(call.dropout)).masked_fill(~mask, 0.0)
    if heads == call.k.shape[1]:
        return probs @ call.v
    return (probs.view(pairs, -1, call.k_len) @ call.v.flatten(0, 1)).view_as(call.q)


def _dense_features(call: Call) -> Tensor | None:
    """Query features times distance features for every key, [B, H, Lq, Lk]; with autograd."""
    if call.query_features is None or call.distance_features is None:
        return None
    dtype = _compute_dtype(call.q.dtype)
    query, table = call.query_features.to(dtype), call.distance_features.to(dtype)
    table = table[..., : call.k_len]
    unseen = call.k_len - table.shape[-1]
    by_distance = torch.nn.functional.pad(query @ table, (0, unseen))
    position = torch.arange(call.k_len, device=query.device)
    distance = position[call.offset :, None] - position
    index = distance.clamp(min=0).expand(*query.shape[:2], -1, -1)
    return by_distance.gather(-1, index).masked_fill(distance < 0, 0.0)


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
    added: Tensor | None = None,
    row_scale: Tensor | None = None,
    scale: float = 1.0,
    window: int | None = None,
) -> Tensor:
    """Softmax over the keys of `scores * scale * weight[d] + bias[d]`, d = distance to the key.

    `added` is one more term, [B, H, Lq, Lk]. The other arguments are those of `attention`, which
    has checked them.
    """
    others = (key_bias, first_key, sink, added, row_scale)
    if scores.is_cuda and all(x is None for x in others):
        from megatron.engines.triton_softmax import can_run_softmax, triton_fused_softmax

        if can_run_softmax(scores) is None:
            return triton_fused_softmax(scores, bias, weight, scale, window)
    probs: Tensor = _FusedSoftmax.apply(scale, window, scores, bias, weight, *others)
    return probs


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _hide_invisible(logits: Tensor, window: int | None, first_key: Tensor | None) -> None:
    """-inf in place for keys in the future, beyond the window, and before the first key."""
    q_len, k_len = logits.shape[-2:]
    ones = torch.ones(q_len, k_len, dtype=torch.bool, device=logits.device)
    hidden = ones.triu(k_len - q_len + 1)
    if window is not None:
        hidden |= ones.tril(k_len - q_len - window)
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
        ctx: Any, scale: float, window: int | None, scores: Tensor, *terms: Tensor | None
    ) -> Tensor:
        bias, weight, key_bias, first_key, sink, added, row_scale = terms
        q_len, k_len = scores.shape[-2:]
        dtype = _compute_dtype(scores.dtype)
        logits = scores.to(dtype) * scale
        if weight is not None:
            logits.mul_(dense_matrix(weight.to(dtype), q_len, k_len))
        if bias is not None:
            logits.add_(dense_matrix(bias.to(dtype), q_len, k_len))
        if added is not None:
            logits.add_(added)
        origin: Tensor | float = 0.0
        if key_bias is not None:
            origin = key_origin(key_bias.to(dtype), q_len)[..., None]
            logits.add_(key_bias.to(dtype)[:, :, None] - origin)
        unscaled = None
        if row_scale is not None:
            unscaled = logits.clone() if ctx.needs_input_grad[9] else None  # less the key origin
            factor = row_scale.to(dtype)[..., None]
            origin = origin * factor
            logits.mul_(factor)
        _hide_invisible(logits, window, first_key)
        sink_probs = None
        if sink is not None:
            rows = sink.to(dtype)[..., None]
            rows = rows[:, None] if sink.dim() == 1 else rows
            probs, sink_probs = _softmax_with_sink(logits, rows - origin)
        else:
            probs = torch.softmax(logits, dim=-1)
            if key_bias is not None:  # a row of -inf alone
                probs.masked_fill_(logits.amax(-1, keepdim=True) == -torch.inf, 0.0)
        probs = probs.to(scores.dtype)
        saved_scores = scores if weight is not None and ctx.needs_input_grad[4] else None
        ctx.save_for_backward(
            *(probs, weight, saved_scores, bias, key_bias, sink, sink_probs, row_scale, unscaled)
        )
        ctx.scale = scale
        return probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_probs: Tensor) -> tuple[Tensor | None, ...]:
        probs_saved, weight, scores, bias, key_bias, sink, sink_probs, *scaling = ctx.saved_tensors
        row_scale, unscaled = scaling
        dtype = _compute_dtype(probs_saved.dtype)
        probs = probs_saved.to(dtype)
        grad_logits = grad_probs.to(dtype) * probs
        expected = grad_logits.sum(-1, keepdim=True)
        grad_logits.sub_(probs * expected)
        del probs
        _, _, needs_scores, needs_bias, _, needs_key_bias, _, needs_sink, needs_added, _ = (
            ctx.needs_input_grad
        )
        grad_bias = grad_weight = grad_scores = grad_key_bias = grad_sink = grad_row_scale = None
        if unscaled is not None:  # a hidden key's -inf has no share
            shares = torch.where(grad_logits == 0, 0.0, grad_logits * unscaled)
            by_row = shares.sum(-1)
            if sink_probs is not None and key_bias is not None:  # the origin does not cancel
                origin = key_origin(key_bias.to(dtype), by_row.shape[-1])
                by_row += origin * (sink_probs * expected)[..., 0]
            grad_row_scale = match_operand(by_row, row_scale)
        if row_scale is not None:
            grad_logits.mul_(row_scale.to(dtype)[..., None])
        grad_added = grad_logits.clone() if needs_added else None
        if needs_bias:
            grad_bias = match_operand(sum_by_distance(grad_logits.sum(0)), bias)
        if needs_key_bias:
            grad_key_bias = match_operand(grad_logits.sum(-2), key_bias)
        if needs_sink:
            grad_sink = match_operand((-sink_probs * expected)[..., 0], sink)
        if scores is not None:
            product = (grad_logits * scores).sum(0)
            grad_weight = match_operand(sum_by_distance(product.mul_(ctx.scale)), weight)
        if needs_scores:
            if weight is not None:
                grad_logits.mul_(dense_matrix(weight.to(dtype), *grad_logits.shape[-2:]))
            grad_scores = grad_logits.mul_(ctx.scale).to(probs_saved.dtype)
        terms = (grad_bias, grad_weight, grad_key_bias, None, grad_sink, grad_added, grad_row_scale)
        return None, None, grad_scores, *terms


# Tables over distance seen as matrices over (query, key), and the way back.
#
# A table holds one number per head and distance. The matrix of a block of `rows` queries and
# `cols` keys, whose last query stands `last` positions after the block's first key, has
# `distance(i, j) = last - (rows - 1 - i) - j`: constant along diagonals, so no matrix needs
# storing. Reversed, and padded with a fill value for the future, the table itself is the matrix,
# read through overlapping strides, last query first:
#
#     reversed table      t3 t2 t1 t0 ..        (.. is the fill: keys in the future)
#     last query, row 0   t3 t2 t1 t0
#     query before, row 1    t2 t1 t0 ..
#
# Hence "flipped" in the names below: row 0 belongs to the block's last query.


def reversed_table(table: Tensor, length: int, padding: int, fill: float) -> Tensor:
    """`[heads, length + padding]`: distances length-1 .. 0, then `padding` times `fill`."""
    out = table.new_full((table.shape[0], length + padding), fill)
    out[:, :length] = table[:, :length].flip(-1)
    return out


def flipped_view(reversed_: Tensor, start: int, rows: int, cols: int) -> Tensor:
    """`[heads, rows, cols]` whose entry (r, c) is `reversed_[:, start + r + c]`; not a copy."""
    stride_head, stride = reversed_.stride()
    return reversed_[:, start:].as_strided(
        (reversed_.shape[0], rows, cols), (stride_head, stride, stride)
    )


def dense_matrix(table: Tensor, q_len: int, k_len: int) -> Tensor:
    """`[heads, q_len, k_len]` with `table[:, distance]`, and 0 where the key is in the future.

    The queries are the last `q_len` of the `k_len` positions.
    """
    padded = reversed_table(table, k_len, q_len - 1, 0.0)
    return flipped_view(padded, 0, q_len, k_len).flip(-2)


def sum_by_distance(matrix: Tensor) -> Tensor:
    """Adjoint of `dense_matrix`: `[heads, q_len, k_len]` to `[heads, k_len]` over distances 0...

    Each row, the last query's first, is padded by `q_len` zeros and the whole read again one
    element narrower, which moves row r by r places: diagonals become columns. Entries in the future
    are left out.
    """
    heads, q_len, k_len = matrix.shape
    width = q_len + k_len - 1
    flat = torch.nn.functional.pad(matrix.flip(-2), (0, q_len)).flatten(1)
    by_diagonal = flat[:, : q_len * width].view(heads, q_len, width).sum(1)
    return by_diagonal[:, :k_len].flip(-1)
