"""Kernels of the fused softmax (triton_softmax.py has its interface).

A row's softmax is a running maximum and sum over its visible keys, then a second pass that writes
the probabilities. The gradient of a table is a sum over diagonals, so its kernel walks the scores
by distance: a program owns a block of distances of one head and a share of the rows, and reads for
each row the keys at those distances, which are neighbours in memory.
"""

# Triton reads the signatures below; their run-time arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, name-defined"

from __future__ import annotations

from megatron.engines.triton_compat import jit, tl

__all__ = ["softmax_backward_kernel", "softmax_forward_kernel", "softmax_table_kernel"]

# k_length is left to Triton to specialise: rows of a multiple of 16 are read in wide loads
_VARYING = [
    "heads", "q_length", "q_offset", "window", "scale", "batch", "rows_each",
    "bias_stride", "weight_stride", "table_width",
]  # fmt: skip


@jit()
def logits_of(
    scores,
    distance,
    mask,
    bias_row,
    weight_row,
    scale,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    """scores * scale * weight + bias in fp32, -inf outside the mask."""
    logits = scores.to(tl.float32) * scale
    if HAS_WEIGHT:
        logits *= tl.load(weight_row + distance, mask=mask, other=0.0)
    if HAS_BIAS:
        logits += tl.load(bias_row + distance, mask=mask, other=0.0)
    return tl.where(mask, logits, float("-inf"))


@jit(do_not_specialize=_VARYING)
def softmax_forward_kernel(
    scores_ptr,
    bias_ptr,
    weight_ptr,
    probs_ptr,
    bias_stride,
    weight_stride,
    heads,
    q_length,
    k_length,
    q_offset,
    window,
    scale,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: a running maximum and sum over its visible keys, then the probabilities."""
    row = tl.program_id(0)
    batch_head = tl.program_id(1).to(tl.int64)
    head = batch_head % heads
    position = q_offset + row
    first = tl.maximum(position - window + 1, 0)
    line = (batch_head * q_length + row) * k_length
    bias_row = bias_ptr
    weight_row = weight_ptr
    if HAS_BIAS:
        bias_row = bias_ptr + head * bias_stride
    if HAS_WEIGHT:
        weight_row = weight_ptr + head * weight_stride
    columns = tl.arange(0, BLOCK)
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(first // BLOCK * BLOCK, position + 1, BLOCK):
        keys = start + columns
        mask = (keys >= first) & (keys <= position)
        scores = tl.load(scores_ptr + line + keys, mask=mask, other=0.0)
        logits = logits_of(
            scores, position - keys, mask, bias_row, weight_row, scale, HAS_BIAS, HAS_WEIGHT
        )
        new_largest = tl.maximum(largest, tl.max(logits, 0))
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        total = total * tl.exp(largest - reference) + tl.sum(tl.exp(logits - reference), 0)
        largest = new_largest
    for start in range(0, k_length, BLOCK):
        keys = start + columns
        mask = (keys >= first) & (keys <= position)
        scores = tl.load(scores_ptr + line + keys, mask=mask, other=0.0)
        logits = logits_of(
            scores, position - keys, mask, bias_row, weight_row, scale, HAS_BIAS, HAS_WEIGHT
        )
        probs = tl.where(mask, tl.exp(logits - largest) / total, 0.0)
        tl.store(
            probs_ptr + line + keys, probs.to(probs_ptr.dtype.element_ty), mask=keys < k_length
        )


@jit(do_not_specialize=_VARYING)
def softmax_backward_kernel(
    probs_ptr,
    grad_ptr,
    weight_ptr,
    grad_scores_ptr,
    delta_ptr,  # [B * H, Lq] fp32: sum of probs * grad, for the table gradients
    weight_stride,
    heads,
    q_length,
    k_length,
    q_offset,
    window,
    scale,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of the gradient of the scores."""
    row = tl.program_id(0)
    batch_head = tl.program_id(1).to(tl.int64)
    position = q_offset + row
    first = tl.maximum(position - window + 1, 0)
    line = (batch_head * q_length + row) * k_length
    columns = tl.arange(0, BLOCK)
    delta = tl.full([], 0.0, tl.float32)
    for start in range(first // BLOCK * BLOCK, position + 1, BLOCK):
        keys = start + columns
        mask = (keys >= first) & (keys <= position)
        probs = tl.load(probs_ptr + line + keys, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + line + keys, mask=mask, other=0.0).to(tl.float32)
        delta += tl.sum(probs * grad, 0)
    tl.store(delta_ptr + batch_head * q_length + row, delta)
    for start in range(0, k_length, BLOCK):
        keys = start + columns
        mask = (keys >= first) & (keys <= position)
        probs = tl.load(probs_ptr + line + keys, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + line + keys, mask=mask, other=0.0).to(tl.float32)
        result = probs * (grad - delta) * scale
        if HAS_WEIGHT:
            weight_row = weight_ptr + (batch_head % heads) * weight_stride
            result *= tl.load(weight_row + (position - keys), mask=mask, other=0.0)
        pointers = grad_scores_ptr + line + keys
        tl.store(pointers, result.to(grad_scores_ptr.dtype.element_ty), mask=keys < k_length)


@jit(do_not_specialize=_VARYING)
def softmax_table_kernel(
    probs_ptr,
    grad_ptr,
    scores_ptr,
    delta_ptr,
    dbias_ptr,  # [shares, H, width] fp32; or None
    dweight_ptr,
    table_width,
    heads,
    batch,
    q_length,
    k_length,
    q_offset,
    window,
    scale,
    rows_each,
    BIAS_GRAD: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
    ROWS: tl.constexpr,
    DISTANCES: tl.constexpr,
):
    """DISTANCES entries of one head's table gradients, over this share's rows of every sequence."""
    distance = tl.program_id(0) * DISTANCES + tl.arange(0, DISTANCES)
    head = tl.program_id(1)
    share = tl.program_id(2)
    dbias = tl.zeros([DISTANCES], tl.float32)
    dweight = tl.zeros([DISTANCES], tl.float32)
    end = tl.minimum((share + 1) * rows_each, q_length)
    for b in range(0, batch):
        batch_head = tl.cast(b, tl.int64) * heads + head
        for start in range(share * rows_each, end, ROWS):
            rows = start + tl.arange(0, ROWS)
            keys = (q_offset + rows)[:, None] - distance[None, :]
            mask = (rows < end)[:, None] & (keys >= 0) & (distance < window)[None, :]
            lines = (batch_head * q_length + rows) * k_length
            offsets = lines[:, None] + keys
            probs = tl.load(probs_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            delta = tl.load(delta_ptr + batch_head * q_length + rows, mask=rows < end, other=0.0)
            grad_logits = probs * (grad - delta[:, None])
            dbias += tl.sum(grad_logits, 0)
            if WEIGHT_GRAD:
                scores = tl.load(scores_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
                dweight += tl.sum(grad_logits * scores, 0)
    target = (tl.cast(share, tl.int64) * heads + head) * table_width + distance
    if BIAS_GRAD:
        tl.store(dbias_ptr + target, dbias)
    if WEIGHT_GRAD:
        tl.store(dweight_ptr + target, dweight * scale)
