"""Cross-entropy over logits whose vocabulary is split over the tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.mpu.groups import SERIAL, TensorParallel


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target] without ever gathering the logits.

    rank 0 holds ids [0, V/2), rank 1 holds [V/2, V): three small all-reduces of [...] give the
    maximum, the sum of exponentials and the target's logit; the gradient is local.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, tp: TensorParallel) -> Tensor:
        share = logits.shape[-1]
        shifted = logits.float()
        peak = shifted.amax(dim=-1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=tp.group)
        shifted = shifted - peak[..., None]
        elsewhere = (targets < tp.rank * share) | (targets >= (tp.rank + 1) * share)
        local = (targets - tp.rank * share).masked_fill(elsewhere, 0)
        target_logit = shifted.gather(-1, local[..., None]).squeeze(-1)
        target_logit = target_logit.masked_fill(elsewhere, 0.0)
        probabilities = shifted.exp_()
        total = probabilities.sum(dim=-1)
        both = torch.stack([target_logit, total])
        dist.all_reduce(both, group=tp.group)
        target_logit, total = both[0], both[1]
        probabilities /= total[..., None]
        ctx.save_for_backward(probabilities, local, elsewhere)
        ctx.dtype = logits.dtype
        return total.log() - target_logit

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        probabilities, local, elsewhere = ctx.saved_tensors
        gradient = probabilities.clone()
        correct = (~elsewhere).to(gradient.dtype)[..., None]
        gradient.scatter_add_(-1, local[..., None], -correct)
        gradient *= grads[0].float()[..., None]
        return gradient.to(ctx.dtype), None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, tp: TensorParallel = SERIAL
) -> Tensor:
    """The loss of each target, fp32, of shape `targets.shape`."""
    if tp.size == 1:
        flat = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none")
        return flat.view_as(targets)
    return _VocabParallelCrossEntropy.apply(logits, targets, tp)
