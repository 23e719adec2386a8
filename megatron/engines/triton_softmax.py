"""The fused softmax on GPU: scale + distance tables + causal mask + window + softmax, one kernel.

Scores and probabilities are bf16, fp16 or fp32; everything inside is fp32. A row's softmax is a
running maximum and sum over its visible keys, then a second pass that writes the probabilities.
The gradient of a table is a sum over diagonals, so its kernel loops over the scores by distance: a
program has a block of distances of one head and a share of the rows, and reads for each row the
keys at those distances, which are adjacent in memory. The partial sums are added in a fixed order:
no atomics, the same numbers every run.

Shapes: scores, probabilities [B, H, Lq, Lk]; tables [H, >= Lk]. The queries are the last positions.
"""

# Triton reads the kernels' signatures; their run-time arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, name-defined"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.engines import triton_runtime
from megatron.engines.call import match_operand
from megatron.engines.triton_forward import head_of_program
from megatron.engines.triton_runtime import Launch, cdiv, jit, next_power_of_2, run_on, tl

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_BLOCK = 2048
_DISTANCES = 128
_ROWS = 16
# a table gradient is split over at most this many programs per head and block of distances
_MAX_SHARES = 32
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
# With fused multiply-adds the lanes that hold one sum of products would disagree in its last bit.
_UNFUSED = {"num_warps": 4, "enable_fp_fusion": False}
# k_length is left to Triton to specialise: rows of a multiple of 16 are read in wide loads
_VARYING = ["heads", "q_length", "q_offset", "window", "scale", "batch", "rows_each"]


@jit()
def row_of_program(q_length, k_length, q_offset, window):
    """This program's row: where its scores begin, its position, the first key that it sees."""
    row = tl.program_id(0)
    batch, head = head_of_program()
    line = ((batch * tl.num_programs(1) + head) * q_length + row) * k_length
    position = q_offset + row
    return line, position, tl.maximum(position - window + 1, 0)


@jit()
def table_row(table_ptr, q_length, q_offset):
    """This program's head's line of a table that is as long as the last query's reach."""
    row = table_ptr
    if table_ptr is not None:
        row += tl.program_id(1).to(tl.int64) * (q_offset + q_length)
    return row


@jit()
def logits_of(scores_row, keys, position, first, bias_row, weight_row, scale):
    """scores * scale * weight + bias in fp32 at these keys, -inf where they are not seen."""
    mask = (keys >= first) & (keys <= position)
    logits = tl.load(scores_row + keys, mask=mask, other=0.0).to(tl.float32) * scale
    if weight_row is not None:
        logits *= tl.load(weight_row + (position - keys), mask=mask, other=0.0)
    if bias_row is not None:
        logits += tl.load(bias_row + (position - keys), mask=mask, other=0.0)
    return tl.where(mask, logits, float("-inf"))


@jit(do_not_specialize=_VARYING)
def softmax_forward_kernel(
    scores_ptr, bias_ptr, weight_ptr, probs_ptr,
    q_length, k_length, q_offset, window, scale,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: a running maximum and sum over its visible keys, then the probabilities."""
    line, position, first = row_of_program(q_length, k_length, q_offset, window)
    bias_row = table_row(bias_ptr, q_length, q_offset)
    weight_row = table_row(weight_ptr, q_length, q_offset)
    columns = tl.arange(0, BLOCK)
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(first // BLOCK * BLOCK, position + 1, BLOCK):
        keys = start + columns
        logits = logits_of(scores_ptr + line, keys, position, first, bias_row, weight_row, scale)
        new_largest = tl.maximum(largest, tl.max(logits, 0))
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        total = total * tl.exp(largest - reference) + tl.sum(tl.exp(logits - reference), 0)
        largest = new_largest
    for start in range(0, k_length, BLOCK):
        keys = start + columns
        logits = logits_of(scores_ptr + line, keys, position, first, bias_row, weight_row, scale)
        mask = (keys >= first) & (keys <= position)
        probs = tl.where(mask, tl.exp(logits - largest) / total, 0.0)
        pointers = probs_ptr + line + keys
        tl.store(pointers, probs.to(probs_ptr.dtype.element_ty), mask=keys < k_length)


@jit()
def probs_and_grads(probs_ptr, grad_ptr, offsets, mask):
    probs = tl.load(probs_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    return probs, tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@jit(do_not_specialize=_VARYING)
def softmax_backward_kernel(
    probs_ptr, grad_ptr, weight_ptr, grad_scores_ptr,
    delta_ptr,  # [B * H, Lq] fp32: sum of probs * grad, for the table gradients
    q_length, k_length, q_offset, window, scale,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of the gradient of the scores."""
    line, position, first = row_of_program(q_length, k_length, q_offset, window)
    weight_row = table_row(weight_ptr, q_length, q_offset)
    columns = tl.arange(0, BLOCK)
    delta = tl.full([], 0.0, tl.float32)
    for start in range(first // BLOCK * BLOCK, position + 1, BLOCK):
        keys = start + columns
        mask = (keys >= first) & (keys <= position)
        probs, grad = probs_and_grads(probs_ptr, grad_ptr, line + keys, mask)
        delta += tl.sum(probs * grad, 0)
    tl.store(delta_ptr + line // k_length, delta)
    for start in range(0, k_length, BLOCK):
        keys = start + columns
        mask = (keys >= first) & (keys <= position)
        probs, grad = probs_and_grads(probs_ptr, grad_ptr, line + keys, mask)
        result = probs * (grad - delta) * scale
        if weight_row is not None:
            result *= tl.load(weight_row + (position - keys), mask=mask, other=0.0)
        pointers = grad_scores_ptr + line + keys
        tl.store(pointers, result.to(grad_scores_ptr.dtype.element_ty), mask=keys < k_length)


@jit(do_not_specialize=_VARYING)
def softmax_table_kernel(
    probs_ptr, grad_ptr, scores_ptr, delta_ptr,
    dbias_ptr, dweight_ptr,  # [shares, H, blocks * DISTANCES] fp32; or None
    heads, batch, q_length, k_length, q_offset, window, scale, rows_each,
    ROWS: tl.constexpr, DISTANCES: tl.constexpr,
):  # fmt: skip
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
            probs, grad = probs_and_grads(probs_ptr, grad_ptr, offsets, mask)
            delta = tl.load(delta_ptr + batch_head * q_length + rows, mask=rows < end, other=0.0)
            grad_logits = probs * (grad - delta[:, None])
            dbias += tl.sum(grad_logits, 0)
            if dweight_ptr is not None:
                scores = tl.load(scores_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
                dweight += tl.sum(grad_logits * scores, 0)
    line = tl.cast(share, tl.int64) * heads + head
    target = line * (tl.num_programs(0) * DISTANCES) + distance
    if dbias_ptr is not None:
        tl.store(dbias_ptr + target, dbias)
    if dweight_ptr is not None:
        tl.store(dweight_ptr + target, dweight * scale)


def can_run_softmax(scores: Tensor) -> str | None:
    """None if the kernel can run on these scores, otherwise the reason."""
    if (reason := triton_runtime.unavailable()) is not None:
        return reason
    if scores.dtype not in _DTYPES:
        return f"it takes bf16, fp16 or fp32 scores, got {scores.dtype}"
    if not scores.is_cuda and not triton_runtime.interpreted():
        return f"it runs on GPU, the scores are on {scores.device}"
    if (reason := triton_runtime.grid_problem(*scores.shape[:2])) is not None:
        return reason
    return triton_runtime.launcher_problem() if scores.is_cuda else None


def triton_fused_softmax(
    scores: Tensor, bias: Tensor | None, weight: Tensor | None, scale: float, window: int | None
) -> Tensor:
    """`reference.fused_softmax` for scores that `can_run_softmax`."""
    probs: Tensor = _TritonSoftmax.apply((window or scores.shape[3], scale), scores, bias, weight)
    return probs


def _table(table: Tensor | None, k_length: int) -> Tensor | None:
    """A table as the kernels read it: fp32, as long as the last query's reach."""
    return None if table is None else table.detach()[:, :k_length].float().contiguous()


# The launches of scores [B, H, Lq, Lk] with `placing`: the window and the scale.
Placing = tuple[int, float]


def _sizes(scores: Tensor, placing: Placing) -> tuple[int | float, ...]:
    q_length, k_length = scores.shape[2:]
    return q_length, k_length, k_length - q_length, *placing


def _row_launch(
    kernel: Any, tensors: tuple[Any, ...], scores: Tensor, placing: Placing, options: dict[str, Any]
) -> Launch:
    """A launch of one program for every row."""
    batch, heads, q_length, k_length = scores.shape
    block = max(16, min(_MAX_BLOCK, next_power_of_2(k_length)))
    arguments = (*tensors, *_sizes(scores, placing))
    return Launch(kernel, (q_length, heads, batch), arguments, {"BLOCK": block, **options})


def forward_launch(
    scores: Tensor, bias: Tensor | None, weight: Tensor | None, placing: Placing
) -> tuple[Launch, Tensor]:
    """The forward launch for contiguous scores, and the probabilities that it fills."""
    probs = torch.empty_like(scores)
    tables = (_table(table, scores.shape[3]) for table in (bias, weight))
    tensors = (scores, *tables, probs)
    return _row_launch(softmax_forward_kernel, tensors, scores, placing, _OPTIONS), probs


def backward_launch(
    probs: Tensor, grad: Tensor, weight: Tensor | None, placing: Placing
) -> tuple[Launch, Tensor, Tensor]:
    """The launch for the gradient of the scores, that gradient, and delta for `table_launch`."""
    batch, heads, q_length, k_length = probs.shape
    grad_scores = torch.empty_like(probs)
    delta = probs.new_empty(batch * heads, q_length, dtype=torch.float32)
    tensors = (probs, grad, _table(weight, k_length), grad_scores, delta)
    launch = _row_launch(softmax_backward_kernel, tensors, probs, placing, _UNFUSED)
    return launch, grad_scores, delta


def table_launch(
    probs: Tensor,
    grad: Tensor,
    delta: Tensor,
    scores: Tensor | None,
    wants_bias: bool,
    placing: Placing,
) -> tuple[Launch, Tensor | None, Tensor | None]:
    """The launch for the table gradients (weight's if `scores` is given), and their shares."""
    batch, heads, q_length, _ = probs.shape
    window, _ = placing
    blocks = cdiv(window, _DISTANCES)
    shares = min(_MAX_SHARES, cdiv(q_length, _ROWS))
    rows_each = cdiv(cdiv(q_length, shares), _ROWS) * _ROWS
    shape = (shares, heads, blocks * _DISTANCES)
    dbias = delta.new_empty(shape) if wants_bias else None
    dweight = delta.new_empty(shape) if scores is not None else None
    sizes = (heads, batch, *_sizes(probs, placing), rows_each)
    arguments = (probs, grad, scores, delta, dbias, dweight, *sizes)
    options = {"ROWS": _ROWS, "DISTANCES": _DISTANCES, **_OPTIONS}
    launch = Launch(softmax_table_kernel, (blocks, heads, shares), arguments, options)
    return launch, dbias, dweight


def _summed(shares: Tensor | None, table: Tensor | None) -> Tensor | None:
    """The gradient of a table from the programs' partial sums; 0 at unseen distances."""
    if shares is None or table is None:
        return None
    return match_operand(shares.sum(0)[:, : table.shape[1]], table)


class _TritonSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, placing: Placing, scores: Tensor, *tables: Tensor | None) -> Tensor:
        bias, weight = tables
        scores = scores.contiguous()
        launch, probs = forward_launch(scores, bias, weight, placing)
        run_on(scores, launch)
        kept = scores if weight is not None and ctx.needs_input_grad[3] else None
        ctx.save_for_backward(probs, bias, weight, kept)
        ctx.placing = placing
        return probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probs, bias, weight, scores = ctx.saved_tensors
        grad = grad.contiguous()
        launch, grad_scores, delta = backward_launch(probs, grad, weight, ctx.placing)
        dbias = dweight = None
        run_on(probs, launch)
        wants_bias = bias is not None and ctx.needs_input_grad[2]
        if wants_bias or scores is not None:
            wanted = (scores, wants_bias, ctx.placing)
            launch, dbias, dweight = table_launch(probs, grad, delta, *wanted)
            run_on(probs, launch)
        return None, grad_scores, _summed(dbias, bias), _summed(dweight, weight)
