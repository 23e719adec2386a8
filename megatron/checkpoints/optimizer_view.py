"""The optimizer's numbers by parameter, however DeepSpeed keeps them.

Three ways to keep fp32 weights and Adam's moments (W: a weight, the bars: data-parallel ranks):

    plain       the parameters themselves                     fp32 without ZeRO
    contiguous  |W1 W2 W|3 W4 ..|  one vector, cut anywhere   BF16_Optimizer, ZeRO 1 and 2
    piecewise   |W1 W2..|W1 W2..|  every parameter cut        ZeRO 3

`read` gives whole tensors (of this tensor-parallel rank), `write` takes them; `read_zero3_shards`
puts the weights of ZeRO 3 together, which lie in its optimizer's files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.checkpoints.safe_files import load_mapping
from megatron.checkpoints.sharding import strip_prefix
from megatron.checkpoints.universal import STEP, WEIGHT, States
from megatron.errors import CheckpointError
from megatron.mpu.parallel_layers import whole_shape

if TYPE_CHECKING:
    from megatron.checkpoints.reading import CheckpointFiles

Span = tuple[nn.Parameter, int, int, int]
"""A parameter, where a rank's part of it begins and ends there, and which element is the first."""


@dataclass
class Group:
    """Parameters whose fp32 numbers lie in one tensor, of which `master` is this rank's part."""

    parameters: list[nn.Parameter]
    master: Tensor
    offsets: list[int] | None
    """Where each begins in all ranks' parts, one after the other; None: cut piecewise."""
    process_group: Any = None
    """None: this rank has all."""

    def gather(self, part: Tensor) -> list[Tensor]:
        """Whole tensors from the ranks' parts."""
        parts = [part.detach().contiguous()]
        if self.process_group is not None:
            parts = [torch.empty_like(part) for _ in range(dist.get_world_size(self.process_group))]
            dist.all_gather(parts, part.detach().contiguous(), group=self.process_group)
        spans = [self._spans(rank, len(parts)) for rank in range(len(parts))]
        wholes = []
        for pieces in zip(*spans, strict=True):
            cut = zip(parts, pieces, strict=True)
            whole = torch.cat([each.view(-1)[start:stop] for each, (_, start, stop, _) in cut])
            wholes.append(whole.view(whole_shape(pieces[0][0])))
        return wholes

    def scatter(self, wholes: list[Tensor]) -> Tensor:
        """This rank's part of whole tensors."""
        result = torch.zeros_like(self.master)
        for whole, (_, start, stop, first) in zip(wholes, self.own_spans(), strict=True):
            result.view(-1)[start:stop] = whole.reshape(-1)[first : first + stop - start]
        return result

    def own_spans(self) -> list[Span]:
        """Where this rank's part holds which elements of each parameter."""
        if self.process_group is None:
            return self._spans(0, 1)
        return self._spans(
            dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        )

    def _spans(self, rank: int, size: int) -> list[Span]:
        spans, part, begin = [], self.master.numel(), 0
        for number, parameter in enumerate(self.parameters):
            count = whole_shape(parameter).numel()
            if self.offsets is None:
                length = -(-count // size)
                own = min(max(count - rank * length, 0), length)
                spans.append((parameter, begin, begin + own, rank * length))
                begin += length
            else:
                offset = self.offsets[number] - rank * part
                start, stop = (min(max(place, 0), part) for place in (offset, offset + count))
                spans.append((parameter, start, stop, start - offset))
        return spans


def groups_of(engine: Any) -> list[Group]:
    """How this engine's optimizer keeps its numbers."""
    wrapper = engine.optimizer
    if wrapper is engine.basic_optimizer:
        return [Group([p], p, [0]) for group in wrapper.param_groups for p in group["params"]]
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):  # ZeRO 3
        pairs = zip(wrapper.fp16_groups, wrapper.fp32_partitioned_groups_flat, strict=True)
        return [Group(list(group), own, None, wrapper.dp_process_group) for group, own in pairs]
    if hasattr(wrapper, "single_partition_of_fp32_groups"):  # ZeRO 1 and 2
        groups, masters = wrapper.round_robin_bit16_groups, wrapper.single_partition_of_fp32_groups
        offsets = wrapper.round_robin_bit16_offsets
    else:  # BF16_Optimizer
        groups, masters = wrapper.bf16_groups, wrapper.fp32_groups_flat_partition
        offsets = [[0, *accumulate(whole_shape(p).numel() for p in group)] for group in groups]
    columns = zip(groups, masters, offsets, wrapper.real_dp_process_group, strict=True)
    return [Group(list(group), *rest) for group, *rest in columns]


@torch.no_grad()
def read(engine: Any) -> Iterator[tuple[nn.Parameter, States]]:
    """Each parameter of this rank's stage with its fp32 weight and the optimizer's states."""
    step = _step_count(engine.basic_optimizer)
    for group in groups_of(engine):
        state = engine.basic_optimizer.state.get(group.master, {})
        columns: dict[str, list[Tensor]] = {WEIGHT: group.gather(group.master)}
        for key, value in sorted(state.items()):  # the same order on all ranks: they gather
            if isinstance(value, Tensor) and value.shape == group.master.shape:
                columns[key] = group.gather(value)
        if state and step is not None:
            columns[STEP] = [step] * len(group.parameters)
        for number, parameter in enumerate(group.parameters):
            yield parameter, {key: column[number] for key, column in columns.items()}


def _step_count(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """One for all: DeepSpeed's fused Adam keeps it with one parameter, apex in the groups."""
    holders = [*optimizer.state.values(), *optimizer.param_groups]
    counts = [float(holder[STEP]) for holder in holders if STEP in holder]
    return torch.tensor(max(counts)) if counts else None


@torch.no_grad()
def write(engine: Any, states: dict[nn.Parameter, States]) -> None:
    """Set every parameter's fp32 weight and states, then the weights the model computes with."""
    optimizer = engine.basic_optimizer
    for group in groups_of(engine):
        columns = [states[parameter] for parameter in group.parameters]
        group.master.data.copy_(group.scatter([column[WEIGHT] for column in columns]))
        for key in [key for key in columns[0] if key != WEIGHT]:
            values = [column[key] for column in columns]
            optimizer.state[group.master][key] = (
                _count(optimizer, values[0], group.master)
                if values[0].dim() == 0
                else group.scatter(values)
            )
    _refresh_weights(engine)


def _count(optimizer: torch.optim.Optimizer, value: Tensor, master: Tensor) -> Tensor | int:
    """Torch's optimizers count steps in a tensor, beside the weights if fused; others in an int."""
    if type(optimizer).__module__.startswith("torch."):
        return value.to(master.device if optimizer.defaults.get("fused") else "cpu", copy=True)
    for group in optimizer.param_groups:
        group[STEP] = int(value)
    return int(value)


def _refresh_weights(engine: Any) -> None:
    """Copy the fp32 weights into those of the model."""
    wrapper = engine.optimizer
    if wrapper is engine.basic_optimizer:
        return
    if hasattr(wrapper, "update_lp_params"):
        wrapper.update_lp_params()
    else:  # ZeRO 3
        for number in range(len(wrapper.fp16_groups)):
            wrapper._reassign_or_swap_out_partitioned_parameters(number)
        if wrapper.persistent_parameters:
            wrapper.persistent_parameters[0].all_gather(wrapper.persistent_parameters)


# The files of ZeRO stage 3: every parameter in equal pieces on the data-parallel ranks.
#
# Rank r's flat fp32 vector holds its piece of each parameter in turn, the last one padded::
#
#     rank 0   [ a0 a1 | b0 b1 b2 | ... ]        a has 4 numbers, b has 5:
#     rank 1   [ a2 a3 | b3 b4 -- | ... ]        pieces of ceil(4/2) = 2 and ceil(5/2) = 3


def read_zero3_shards(files: CheckpointFiles) -> list[dict[str, Tensor]]:
    """Each model-parallel rank's tensors, whole, in fp32, named `<index>.<name>`."""
    return [
        _join(_shapes(files, mp_rank), _flat_pieces(files, mp_rank), files.directory)
        for mp_rank in range(files.mp_size)
    ]


def _shapes(files: CheckpointFiles, mp_rank: int) -> dict[str, torch.Size]:
    path = files.zero_model_files.get((0, mp_rank))
    if path is None:
        raise CheckpointError(
            f"{files.directory}: zero_pp_rank_0_mp_rank_{mp_rank:02d}_model_states.pt is missing"
        )
    state = load_mapping(path)
    if state.get("frozen_param_shapes"):
        raise CheckpointError(
            f"{path}: holds frozen parameters; merge it with DeepSpeed's zero_to_fp32.py first"
        )
    groups: list[dict[str, torch.Size]] = state.get("param_shapes") or []
    return {name: shape for group in groups for name, shape in group.items()}


def _flat_pieces(files: CheckpointFiles, mp_rank: int) -> list[Tensor]:
    """Each data-parallel rank's vector, its parameter groups one after the other."""
    pieces: list[Tensor] = []
    count = None
    while path := files.zero_optimizer_files.get((len(pieces), mp_rank)):
        optimizer = load_mapping(path).get("optimizer_state_dict") or {}
        flat = optimizer.get("fp32_flat_groups")
        if flat is None:
            raise CheckpointError(f"{path}: holds no fp32_flat_groups of ZeRO stage 3")
        count = optimizer.get("partition_count", count)
        pieces.append(torch.cat([group.flatten() for group in flat]))
    if not pieces or (isinstance(count, int) and count != len(pieces)):
        raise CheckpointError(
            f"{files.directory}: a ZeRO stage 3 checkpoint keeps its weights in the optimizer "
            f"files, and {len(pieces)} of {count or 'them'} are there for model-parallel rank "
            f"{mp_rank}; copy all zero_pp_rank_*_optim_states.pt files"
        )
    return pieces


def _join(shapes: dict[str, torch.Size], pieces: list[Tensor], source: Path) -> dict[str, Tensor]:
    needed = sum(-(-shape.numel() // len(pieces)) for shape in shapes.values())
    if any(piece.numel() < needed for piece in pieces):
        raise CheckpointError(f"{source}: the optimizer files hold fewer numbers than the model")
    result: dict[str, Tensor] = {}
    start = 0
    for name, shape in shapes.items():
        numel = shape.numel()
        length = -(-numel // len(pieces))
        parts = [piece[start : start + length] for piece in pieces]
        result[strip_prefix(name, source)] = torch.cat(parts)[:numel].view(shape)
        start += length
    return result
