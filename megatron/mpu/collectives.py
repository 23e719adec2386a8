"""Collectives over a tensor-parallel group whose backward is the matching collective."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu.groups import TensorParallel


def _all_reduce(x: Tensor, tp: TensorParallel) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=tp.group)
    return x


def _gather_last(x: Tensor, tp: TensorParallel) -> Tensor:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(tp.size)]
    dist.all_gather(parts, x, group=tp.group)
    return torch.cat(parts, dim=-1)


def _slice_last(x: Tensor, tp: TensorParallel) -> Tensor:
    return x[..., tp.slice_of(x.shape[-1], "last dimension")].contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grads[0], ctx.tp), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        return _all_reduce(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return _gather_last(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _slice_last(grads[0], ctx.tp), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return _slice_last(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gather_last(grads[0], ctx.tp), None


def copy_to_group(x: Tensor, tp: TensorParallel) -> Tensor:
    """The same input on every rank; gradients of the ranks are summed."""
    return x if tp.size == 1 else _Copy.apply(x, tp)


def reduce_from_group(x: Tensor, tp: TensorParallel) -> Tensor:
    """The sum of the ranks' partial results."""
    return x if tp.size == 1 else _Reduce.apply(x, tp)


def gather_from_group(x: Tensor, tp: TensorParallel) -> Tensor:
    """The ranks' slices of the last dimension, side by side."""
    return x if tp.size == 1 else _Gather.apply(x, tp)


def scatter_to_group(x: Tensor, tp: TensorParallel) -> Tensor:
    """This rank's slice of the last dimension."""
    return x if tp.size == 1 else _Scatter.apply(x, tp)
