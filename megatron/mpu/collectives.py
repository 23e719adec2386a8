"""Process groups, and collectives whose backward is the matching collective.

Groups are passed to the layers that need them; there is no global state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.backends.deepspeed_processes import build_grid, sequence_group
from megatron.neox_arguments.optimization_keys import data_parallel_size
from megatron.neox_arguments.run_keys import ParallelArgs


@dataclass(frozen=True)
class _GroupOfRanks:
    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1


class TensorParallel(_GroupOfRanks):
    """The ranks that hold slices of the same layer."""

    def slice_of(self, total: int, what: str) -> slice:
        """This rank's share of `total` items."""
        if total % self.size:
            raise ValueError(
                f"{what} = {total} cannot be split over model_parallel_size = {self.size}: "
                f"choose a model_parallel_size that divides {total}"
            )
        share = total // self.size
        return slice(self.rank * share, (self.rank + 1) * share)


class SequenceParallel(_GroupOfRanks):
    """The ranks that hold parts of the same sequences, in the order of the positions."""

    def own(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of the positions, or (`dim`) of the heads; a view."""
        if self.size == 1:
            return x
        share = x.shape[dim] // self.size
        return x.narrow(dim, self.rank * share, share)


SERIAL = TensorParallel()
WHOLE = SequenceParallel()
Step = Callable[[Tensor, Any], Tensor]
Value = TypeVar("Value")


@dataclass(frozen=True)
class ParallelState:
    """This process's coordinates in the pipeline x data x tensor grid.

    The ranks of a sequence are neighbours on its data axis: to DeepSpeed they are data-parallel.
    """

    tp: TensorParallel
    pp_rank: int
    dp_rank: int
    dp_size: int
    grid: Any
    """DeepSpeed's grid, for its engine only; None without DeepSpeed."""
    sp: SequenceParallel = WHOLE

    @property
    def data_rank(self) -> int:
        """Which share of the samples is this rank's: ranks of a sequence have the same."""
        return self.dp_rank // self.sp.size

    @property
    def data_size(self) -> int:
        return self.dp_size // self.sp.size


def initialize_parallel(options: ParallelArgs, *, serial: bool = False) -> ParallelState:
    """Build the grid on the initialised process group; `serial`: one process, without groups."""
    if serial:
        return ParallelState(SERIAL, pp_rank=0, dp_rank=0, dp_size=1, grid=None)
    grid = build_grid(
        pipe=max(options.pipe_parallel_size, 1),
        model=options.model_parallel_size,
        data=data_parallel_size(options, dist.get_world_size()),
    )
    dp_rank, shared = grid.get_data_parallel_rank(), options.sequence_parallel_size
    return ParallelState(
        tp=TensorParallel(
            group=grid.get_slice_parallel_group(),
            rank=grid.get_slice_parallel_rank(),
            size=grid.get_slice_parallel_world_size(),
        ),
        pp_rank=grid.get_pipe_parallel_rank(),
        dp_rank=dp_rank,
        dp_size=grid.get_data_parallel_world_size(),
        grid=grid,
        sp=SequenceParallel(sequence_group(grid, shared), dp_rank % shared, shared),
    )


def gather_objects(value: Value) -> list[Value]:
    """All-gather of plain objects over the default group, in the order of the ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# Collectives over a tensor-parallel group.


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


def _same(x: Tensor, tp: TensorParallel) -> Tensor:
    return x.view_as(x)


class _Collective(torch.autograd.Function):
    """One function of (tensor, group) in the forward pass, another in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Any, forward_op: Step, backward_op: Step) -> Tensor:
        ctx.tp, ctx.backward_op = tp, backward_op
        return forward_op(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.backward_op(grads[0], ctx.tp), None, None, None


def copy_to_group(x: Tensor, tp: TensorParallel) -> Tensor:
    """The same input on every rank; gradients of the ranks are summed."""
    return x if tp.size == 1 else _Collective.apply(x, tp, _same, _all_reduce)


def reduce_from_group(x: Tensor, tp: TensorParallel) -> Tensor:
    """All-reduce: the sum of the ranks' partial results."""
    return x if tp.size == 1 else _Collective.apply(x, tp, _all_reduce, _same)


def gather_from_group(x: Tensor, tp: TensorParallel) -> Tensor:
    """All-gather of the ranks' slices, concatenated along the last dimension."""
    return x if tp.size == 1 else _Collective.apply(x, tp, _gather_last, _slice_last)


def scatter_to_group(x: Tensor, tp: TensorParallel) -> Tensor:
    """This rank's slice of the last dimension."""
    return x if tp.size == 1 else _Collective.apply(x, tp, _slice_last, _gather_last)


# All-to-all over the ranks of a sequence (Ulysses): tensors are [batch, heads, positions, ...].


def _to_heads(x: Tensor, sp: SequenceParallel) -> Tensor:
    parts = x.unflatten(1, (sp.size, -1)).movedim(1, 0).contiguous()
    return _exchanged(parts, sp).movedim(0, 2).flatten(2, 3)


def _to_positions(x: Tensor, sp: SequenceParallel) -> Tensor:
    parts = x.unflatten(2, (sp.size, -1)).movedim(2, 0).contiguous()
    return _exchanged(parts, sp).movedim(0, 1).flatten(1, 2)


def _exchanged(parts: Tensor, sp: SequenceParallel) -> Tensor:
    """Part i goes to rank i; part i of the result is from rank i."""
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=sp.group)
    return received


def positions_to_heads(x: Tensor, sp: SequenceParallel) -> Tensor:
    """From all heads of this rank's positions to all positions of this rank's heads."""
    return x if sp.size == 1 else _Collective.apply(x, sp, _to_heads, _to_positions)


def heads_to_positions(x: Tensor, sp: SequenceParallel) -> Tensor:
    """The inverse of `positions_to_heads`."""
    return x if sp.size == 1 else _Collective.apply(x, sp, _to_positions, _to_heads)


# Cross-entropy over logits whose vocabulary is split over the tensor-parallel ranks.


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target] without ever gathering the logits.

    rank 0 holds ids [0, V/2), rank 1 holds [V/2, V): two small all-reduces give the maximum, then
    the sum of exponentials with the target's logit; the gradient is local.
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
