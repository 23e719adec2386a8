"""Gradient clipping by the norm of the whole model, whatever its layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def _counts_here(parameter: nn.Parameter, tp_rank: int) -> bool:
    """Whether this rank is the one that adds the parameter to the norm.

    Slices count everywhere, whole copies on the first tensor-parallel rank, and an embedding that
    a later pipeline stage uses again (DeepSpeed marks it) only where it came from.
    """
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return tp_rank == 0 or bool(getattr(parameter, "model_parallel", False))


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    *,
    tp_rank: int,
    replica: dist.ProcessGroup | None,
) -> float:
    """Scale the gradients so that their norm over all ranks of `replica` is at most `max_norm`.

    DeepSpeed's own fp32 clipping counts, on every pipeline stage but the first, only the slices of
    tensor-parallel layers: the stages of one model would be clipped by different norms.
    """
    with_gradient = [p for p in parameters if p.grad is not None]
    norm = _norm([p for p in with_gradient if _counts_here(p, tp_rank)], replica)
    if norm > max_norm:
        torch._foreach_mul_([p.grad for p in with_gradient], max_norm / (norm + 1e-6))
    elif not norm < float("inf"):
        for parameter in with_gradient:  # the step will be refused; make that certain everywhere
            assert parameter.grad is not None
            parameter.grad.fill_(float("nan"))
    return norm


def _norm(parameters: list[nn.Parameter], replica: dist.ProcessGroup | None) -> float:
    gradients = [p.grad.float() for p in parameters if p.grad is not None]
    if gradients:
        square = torch.stack(list(torch._foreach_norm(gradients))).square().sum()
    else:
        square = torch.zeros(())
    square = _on_collective_device(square)
    if dist.is_initialized():
        dist.all_reduce(square, group=replica)
    return float(square.sqrt())


def _on_collective_device(value: Tensor) -> Tensor:
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return value.cuda() if on_gpu else value
