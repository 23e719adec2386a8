"""The optimizer's numbers by parameter, however DeepSpeed keeps them.

Three ways to keep fp32 weights and Adam's moments (W: a weight, the bars: data-parallel ranks):

    plain       the parameters themselves                     fp32 without ZeRO
    contiguous  |W1 W2 W|3 W4 ..|  one vector, cut anywhere   BF16_Optimizer, ZeRO 1 and 2
    piecewise   |W1 W2..|W1 W2..|  every parameter cut        ZeRO 3

`read` gives whole tensors (of this tensor-parallel rank), `write` takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.checkpoints.sharding import Sharding, strip_prefix, with_rows
from megatron.checkpoints.universal import STEP, WEIGHT, States
from megatron.errors import CheckpointError
from megatron.mpu import TensorParallel
from megatron.mpu.parallel_layers import whole_shape


def _numel(parameter: nn.Parameter) -> int:
    return whole_shape(parameter).numel()


@dataclass
class Group:
    """Parameters whose fp32 numbers lie in one tensor `master`, whole or this rank's part of it."""

    parameters: list[nn.Parameter]
    master: Tensor
    process_group: Any = None
    offsets: list[int] = field(default_factory=list)
    piecewise: bool = False

    def gather(self, part: Tensor) -> list[Tensor]:
        """Whole tensors from the ranks' parts."""
        if self.process_group is None:
            return [part.detach().view(whole_shape(self.parameters[0]))]
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(self.process_group))]
        dist.all_gather(parts, part.detach().contiguous(), group=self.process_group)
        if self.piecewise:
            return [
                torch.cat([p[start : start + length] for p in parts])[: _numel(w)].view(
                    whole_shape(w)
                )
                for w, start, length in self._pieces(len(parts))
            ]
        flat = torch.cat(parts)
        return [
            flat[start : start + _numel(w)].view(whole_shape(w))
            for w, start in zip(self.parameters, self.offsets, strict=True)
        ]

    def scatter(self, wholes: list[Tensor]) -> Tensor:
        """This rank's part of whole tensors."""
        if self.process_group is None:
            return wholes[0].reshape(self.master.shape).to(self.master.device)
        size, rank = dist.get_world_size(self.process_group), dist.get_rank(self.process_group)
        result = torch.zeros_like(self.master)
        if self.piecewise:
            for (_, start, length), whole in zip(self._pieces(size), wholes, strict=True):
                own = whole.reshape(-1)[rank * length : (rank + 1) * length]
                result[start : start + own.numel()] = own
            return result
        flat = torch.zeros(self.master.numel() * size, dtype=result.dtype)
        for whole, start in zip(wholes, self.offsets, strict=True):
            flat[start : start + whole.numel()] = whole.reshape(-1)
        part = self.master.numel()
        return result.copy_(flat[rank * part : (rank + 1) * part])

    def own_spans(self, rank: int, size: int) -> Iterator[tuple[nn.Parameter, int, int]]:
        """Each parameter and where its elements, or some of them, lie in this rank's part."""
        part = self.master.numel()
        if self.process_group is None:
            yield self.parameters[0], 0, part
        elif self.piecewise:
            for parameter, start, length in self._pieces(size):
                own = min(max(_numel(parameter) - rank * length, 0), length)
                yield parameter, start, start + own
        else:
            for parameter, offset in zip(self.parameters, self.offsets, strict=True):
                start, stop = offset - rank * part, offset + _numel(parameter) - rank * part
                yield parameter, min(max(start, 0), part), min(max(stop, 0), part)

    def _pieces(self, size: int) -> Iterator[tuple[nn.Parameter, int, int]]:
        start = 0
        for parameter in self.parameters:
            length = -(-_numel(parameter) // size)
            yield parameter, start, length
            start += length


def _running(parameters: Iterable[nn.Parameter]) -> list[int]:
    offsets, position = [], 0
    for parameter in parameters:
        offsets.append(position)
        position += _numel(parameter)
    return offsets


def groups_of(engine: Any) -> list[Group]:
    """How this engine's optimizer keeps its numbers."""
    wrapper = engine.optimizer
    if wrapper is engine.basic_optimizer:
        return [Group([p], p) for group in wrapper.param_groups for p in group["params"]]
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):  # ZeRO 3
        return [
            Group(list(parameters), master, wrapper.dp_process_group, piecewise=True)
            for parameters, master in zip(
                wrapper.fp16_groups, wrapper.fp32_partitioned_groups_flat, strict=True
            )
        ]
    if hasattr(wrapper, "single_partition_of_fp32_groups"):  # ZeRO 1 and 2
        offsets = getattr(wrapper, "round_robin_bit16_offsets", None)
        return [
            Group(
                list(parameters),
                wrapper.single_partition_of_fp32_groups[i],
                wrapper.real_dp_process_group[i],
                list(offsets[i]) if offsets else _running(parameters),
            )
            for i, parameters in enumerate(wrapper.round_robin_bit16_groups)
        ]
    assert hasattr(wrapper, "fp32_groups_flat_partition"), type(wrapper)  # BF16_Optimizer
    return [
        Group(
            list(parameters),
            wrapper.fp32_groups_flat_partition[i],
            wrapper.real_dp_process_group[i],
            _running(parameters),
        )
        for i, parameters in enumerate(wrapper.bf16_groups)
    ]


@torch.no_grad()
def read(engine: Any) -> Iterator[tuple[nn.Parameter, States]]:
    """Each parameter of this rank's stage with its fp32 weight and the optimizer's states."""
    common = cache(partial(_common, engine))
    for group in groups_of(engine):
        state = engine.basic_optimizer.state.get(group.master, {})
        columns: dict[str, list[Tensor]] = {WEIGHT: group.gather(group.master)}
        for key, value in sorted(state.items()):  # the same order on all ranks: they gather
            if isinstance(value, Tensor) and value.shape == group.master.shape:
                columns[key] = group.gather(value)
            else:  # the step count
                columns[key] = [common(key)] * len(group.parameters)
        if state and STEP not in columns and (count := _group_count(engine)) is not None:
            columns[STEP] = [count] * len(group.parameters)
        for number, parameter in enumerate(group.parameters):
            yield parameter, {key: column[number].clone() for key, column in columns.items()}


def _common(engine: Any, key: str) -> Tensor:
    """One count for all: DeepSpeed's fused Adam keeps it with a group's last parameter only."""
    counts = [float(state[key]) for state in engine.basic_optimizer.state.values() if key in state]
    return torch.tensor(max(counts), dtype=torch.float32)


def _group_count(engine: Any) -> Tensor | None:
    """apex counts steps in its parameter groups."""
    counts = [group[STEP] for group in engine.basic_optimizer.param_groups if STEP in group]
    return torch.tensor(float(max(counts))) if counts else None


@torch.no_grad()
def write(engine: Any, states: dict[nn.Parameter, States]) -> None:
    """Set every parameter's fp32 weight and states, then the weights the model computes with."""
    optimizer = engine.basic_optimizer
    for group in groups_of(engine):
        columns = [states[parameter] for parameter in group.parameters]
        group.master.data.copy_(group.scatter([column[WEIGHT] for column in columns]))
        own = engine.basic_optimizer.state[group.master]
        for key in [key for key in columns[0] if key != WEIGHT]:
            values = [column[key] for column in columns]
            is_scalar = values[0].dim() == 0
            own[key] = (
                _count(optimizer, values[0], group.master) if is_scalar else group.scatter(values)
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


# Whole tensors by canonical name, and the share of them that this rank's engine holds.


def canonical_names(module: nn.Module) -> dict[nn.Parameter, str]:
    """Each parameter's name in every layout: `<layer index>.<name>`."""
    source = Path("model")
    return {p: strip_prefix(name, source) for name, p in module.named_parameters()}


def joined(name: str, value: Tensor, sharding: Sharding, tp: TensorParallel) -> Tensor:
    """All tensor-parallel ranks' slices as one; scalars (the step count) as they are."""
    if tp.size == 1 or value.dim() == 0:
        return value
    shards = [torch.empty_like(value) for _ in range(tp.size)]
    dist.all_gather(shards, value.contiguous(), group=tp.group)
    return sharding.merge(name, shards).contiguous()


def place(
    engine: Any,
    whole_states: Callable[[str], States],
    sharding: Sharding,
    tp: TensorParallel,
    source: Path,
    *,
    padded_vocabulary: int | None = None,
) -> None:
    """Set the engine's weights, and the optimizer's states that are given, from whole tensors.

    `padded_vocabulary`: rows that a vocabulary has here, if its padding may differ from the source.
    """
    states: dict[nn.Parameter, States] = {}
    for parameter, name in canonical_names(engine.module).items():
        shape = whole_shape(parameter)
        rows = padded_vocabulary if sharding.has_vocabulary_rows(name) else None
        share = {
            key: value if value.dim() == 0 else _share(name, value, shape, sharding, tp, rows)
            for key, value in whole_states(name).items()
        }
        if share[WEIGHT].shape != shape:
            raise CheckpointError(
                f"{source}: {name} gives {tuple(share[WEIGHT].shape)}, but this config's model has "
                f"{tuple(shape)}; resume with the model settings it was trained with"
            )
        states[parameter] = share
    write(engine, states)


def _share(
    name: str,
    value: Tensor,
    shape: torch.Size,
    sharding: Sharding,
    tp: TensorParallel,
    rows: int | None,
) -> Tensor:
    """This rank's part, of shape `shape`, of a whole tensor."""
    if value.dim() == 1 and len(shape) > 1:  # DeepSpeed's converter flattens what ZeRO 3 saved
        whole, dim = list(shape), sharding.dim(name)
        if dim is not None:
            whole[dim] *= tp.size
        value = value.view(whole) if value.numel() == torch.Size(whole).numel() else value
    if rows is not None:
        value = with_rows(value, rows)
    return sharding.split(name, value, tp.rank, tp.size)
