"""The fused softmax on GPU: scale + distance tables + causal mask + window + softmax, one kernel.

Scores and probabilities are bf16, fp16 or fp32; everything inside is fp32. Table gradients are
shares of several programs, summed in a fixed order: no atomics, the same numbers every run.

Shapes: scores, probabilities [B, H, Lq, Lk]; tables [H, >= q_offset + Lq].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.engines.triton_compat import (
    Launch,
    cdiv,
    device_of,
    interpreted,
    launcher_problem,
    next_power_of_2,
    unavailable,
)
from megatron.engines.triton_softmax_kernels import (
    softmax_backward_kernel,
    softmax_forward_kernel,
    softmax_table_kernel,
)
from megatron.errors import EngineError

__all__ = ["can_run_softmax", "triton_fused_softmax"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_BLOCK = 2048
_DISTANCES = 128
_ROWS = 16
# a table gradient is split over at most this many programs per head and block of distances
_MAX_SHARES = 32


def can_run_softmax(
    scores: Tensor, bias: Tensor | None = None, weight: Tensor | None = None
) -> str | None:
    """None if the kernel can run on these scores, otherwise the reason."""
    if (reason := unavailable()) is not None:
        return reason
    if scores.dtype not in _DTYPES:
        return f"it takes bf16, fp16 or fp32 scores, got {scores.dtype}"
    if not scores.is_cuda and not interpreted():
        return f"it runs on GPU, the scores are on {scores.device}"
    if any(t is not None and t.device != scores.device for t in (bias, weight)):
        return f"the tables must be on {scores.device}, like the scores"
    return launcher_problem() if scores.is_cuda else None


def triton_fused_softmax(
    scores: Tensor,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    scale: float = 1.0,
    window: int | None = None,
    q_offset: int | None = None,
) -> Tensor:
    """Softmax over the keys of `scores * scale * weight[d] + bias[d]`, causal, distances < window.

    Row i stands at position q_offset + i (default: the queries are the last positions).
    """
    if (reason := can_run_softmax(scores, bias, weight)) is not None:
        raise EngineError(f"the Triton softmax cannot run: {reason}")
    q_length, k_length = scores.shape[-2:]
    q_offset = k_length - q_length if q_offset is None else q_offset
    window = k_length if window is None else min(window, k_length)
    probs: Tensor = _TritonSoftmax.apply(scores, bias, weight, scale, window, q_offset)
    return probs


def _block(k_length: int) -> int:
    return max(16, min(_MAX_BLOCK, next_power_of_2(k_length)))


def _fp32_rows(table: Tensor | None) -> Tensor | None:
    return None if table is None else table.detach().float().contiguous()


def _row_stride(table: Tensor | None) -> int:
    return 0 if table is None else table.stride(0)


def forward_launch(
    scores: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    scale: float,
    window: int,
    q_offset: int,
) -> tuple[Launch, Tensor]:
    """The forward launch for contiguous scores, and the probabilities that it fills."""
    batch, heads, q_length, k_length = scores.shape
    probs = torch.empty_like(scores)
    bias, weight = _fp32_rows(bias), _fp32_rows(weight)
    arguments = (
        scores, bias, weight, probs, _row_stride(bias), _row_stride(weight),
        heads, q_length, k_length, q_offset, window, scale,
    )  # fmt: skip
    options = {
        "HAS_BIAS": bias is not None,
        "HAS_WEIGHT": weight is not None,
        "BLOCK": _block(k_length),
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    return Launch(softmax_forward_kernel, (q_length, batch * heads), arguments, options), probs


def backward_launch(
    probs: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    scale: float,
    window: int,
    q_offset: int,
) -> tuple[Launch, Tensor, Tensor]:
    """The launch for the gradient of the scores, that gradient, and delta for `table_launch`."""
    batch, heads, q_length, k_length = probs.shape
    grad_scores = torch.empty_like(probs)
    delta = probs.new_empty(batch * heads, q_length, dtype=torch.float32)
    weight = _fp32_rows(weight)
    arguments = (
        probs, grad, weight, grad_scores, delta, _row_stride(weight),
        heads, q_length, k_length, q_offset, window, scale,
    )  # fmt: skip
    options = {
        "HAS_WEIGHT": weight is not None,
        "BLOCK": _block(k_length),
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    launch = Launch(softmax_backward_kernel, (q_length, batch * heads), arguments, options)
    return launch, grad_scores, delta


def table_launch(
    probs: Tensor,
    grad: Tensor,
    scores: Tensor | None,
    delta: Tensor,
    wants_bias: bool,
    scale: float,
    window: int,
    q_offset: int,
) -> tuple[Launch, Tensor | None, Tensor | None]:
    """The launch for the table gradients (weight's if `scores` is given), and their shares."""
    batch, heads, q_length, k_length = probs.shape
    blocks = cdiv(min(window, q_offset + q_length), _DISTANCES)
    shares = min(_MAX_SHARES, cdiv(q_length, _ROWS))
    rows_each = cdiv(cdiv(q_length, shares), _ROWS) * _ROWS
    shape = (shares, heads, blocks * _DISTANCES)
    dbias = delta.new_empty(shape) if wants_bias else None
    dweight = delta.new_empty(shape) if scores is not None else None
    arguments = (
        probs, grad, scores, delta, dbias, dweight, blocks * _DISTANCES,
        heads, batch, q_length, k_length, q_offset, window, scale, rows_each,
    )  # fmt: skip
    options = {
        "BIAS_GRAD": wants_bias,
        "WEIGHT_GRAD": scores is not None,
        "ROWS": _ROWS,
        "DISTANCES": _DISTANCES,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    launch = Launch(softmax_table_kernel, (blocks, heads, shares), arguments, options)
    return launch, dbias, dweight


def _summed(shares: Tensor | None, table: Tensor | None) -> Tensor | None:
    """The gradient of a table from the programs' shares; distances that nobody sees get 0."""
    if shares is None or table is None:
        return None
    width = min(shares.shape[2], table.shape[1])
    grad = torch.zeros_like(table)
    grad[:, :width] = shares.sum(0)[:, :width]
    return grad


class _TritonSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        bias: Tensor | None,
        weight: Tensor | None,
        scale: float,
        window: int,
        q_offset: int,
    ) -> Tensor:
        scores = scores.contiguous()
        launch, probs = forward_launch(scores, bias, weight, scale, window, q_offset)
        with device_of(scores):
            launch.run()
        kept = scores if weight is not None and ctx.needs_input_grad[2] else None
        ctx.save_for_backward(probs, bias, weight, kept)
        ctx.settings = (scale, window, q_offset)
        return probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probs, bias, weight, scores = ctx.saved_tensors
        grad = grad.contiguous()
        launch, grad_scores, delta = backward_launch(probs, grad, weight, *ctx.settings)
        dbias = dweight = None
        with device_of(probs):
            launch.run()
            wants_bias = bias is not None and ctx.needs_input_grad[1]
            if wants_bias or scores is not None:
                launch, dbias, dweight = table_launch(
                    probs, grad, scores, delta, wants_bias, *ctx.settings
                )
                launch.run()
        return grad_scores, _summed(dbias, bias), _summed(dweight, weight), None, None, None
