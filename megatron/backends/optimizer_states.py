"""The optimizer's weights and states by parameter, however an engine stores them.

Three layouts of fp32 weights and Adam's moments (W: a weight, the bars: data-parallel ranks):

    plain       the parameters themselves                     fp32 without ZeRO
    contiguous  |W1 W2 W|3 W4 ..|  one vector, cut anywhere   BF16_Optimizer, ZeRO 1 and 2
    piecewise   |W1 W2..|W1 W2..|  every parameter cut        ZeRO 3

`read_states` gives whole tensors (of this tensor-parallel rank), `write_states` takes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from megatron.backends.interface import STEP, WEIGHT, Span, States, full_shape
from megatron.errors import CheckpointError


@dataclass
class Group:
    """Parameters whose fp32 numbers are in one tensor, of which `master` is this rank's part."""

    parameters: list[nn.Parameter]
    master: Tensor
    offsets: list[int] | None
    """Where each begins in all ranks' parts, one after the other; None: cut piecewise."""
    process_group: dist.ProcessGroup | None = None
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
            wholes.append(whole.view(full_shape(pieces[0][0])))
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
            count = full_shape(parameter).numel()
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


def plain_groups(optimizer: Optimizer) -> list[Group]:
    """An optimizer that steps the parameters themselves."""
    return [Group([p], p, [0]) for group in optimizer.param_groups for p in group["params"]]


class StatesByParameter:
    """The methods of a `TrainingEngine` that tell weights and states by parameter."""

    optimizer: Optimizer

    def _groups(self) -> list[Group]:
        """How this engine's optimizer stores weights and states."""
        return plain_groups(self.optimizer)

    def master_spans(self) -> Iterator[tuple[Tensor, list[Span]]]:
        for group in self._groups():
            yield group.master, group.own_spans()

    @torch.no_grad()
    def read_states(self) -> Iterator[tuple[nn.Parameter, States]]:
        step = _step_count(self.optimizer)
        for group in self._groups():
            tensors, numbers = states_of(self.optimizer, group.master)
            columns: dict[str, list[Tensor]] = {WEIGHT: group.gather(group.master)}
            columns |= {key: group.gather(value) for key, value in tensors.items()}
            if step is not None and (tensors or numbers):
                numbers[STEP] = step
            columns |= {key: [value] * len(group.parameters) for key, value in numbers.items()}
            for number, parameter in enumerate(group.parameters):
                yield parameter, {key: column[number] for key, column in columns.items()}

    @torch.no_grad()
    def write_states(self, states: dict[nn.Parameter, States]) -> None:
        for group in self._groups():
            columns = [states[parameter] for parameter in group.parameters]
            group.master.data.copy_(group.scatter([column[WEIGHT] for column in columns]))
            for key in [key for key in columns[0] if key != WEIGHT]:
                values = [column[key] for column in columns]
                self.optimizer.state[group.master][key] = (
                    _number(self.optimizer, values[0], group.master)
                    if values[0].dim() == 0
                    else group.scatter(values)
                )


def states_of(optimizer: Optimizer, master: Tensor) -> tuple[States, States]:
    """The optimizer's state of one of its tensors: tensors of that shape, and numbers.

    Sorted, so that the ranks gather them in the same order.
    """
    tensors, numbers = States(), States()
    for key, value in sorted(optimizer.state.get(master, {}).items()):
        if isinstance(value, Tensor) and value.shape == master.shape:
            tensors[key] = value
        elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            numbers[key] = torch.as_tensor(
                value, dtype=torch.float64 if isinstance(value, float) else None
            ).reshape(())
        elif value is not None:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps {key}{shape} for a tensor of shape "
                f"{tuple(master.shape)}; only tensors of that shape, and numbers, fit another "
                "layout. Resume under the layout that wrote the checkpoint."
            )
    return tensors, numbers


def _step_count(optimizer: Optimizer) -> Tensor | None:
    """One for all: DeepSpeed's fused Adam keeps it with one parameter, apex in the groups."""
    holders = [*optimizer.state.values(), *optimizer.param_groups]
    counts = [holder[STEP] for holder in holders if STEP in holder]
    if not counts:
        return None
    whole = not _counts_in(optimizer) and all(isinstance(count, int) for count in counts)
    return torch.tensor(max(map(int if whole else float, counts)))


def _counts_in(optimizer: Optimizer) -> str | None:
    """Where a known optimizer stores its step count: torch's in a tensor, apex's in its groups."""
    package = type(optimizer).__module__.partition(".")[0]
    return {"torch": "tensor", "apex": "groups", "deepspeed": "groups"}.get(package)


def _number(optimizer: Optimizer, value: Tensor, master: Tensor) -> Any:
    """A number as the optimizer keeps it: as `states_of` found it, or in its known way."""
    known = _counts_in(optimizer)
    if known == "tensor":
        return value.to(master.device if optimizer.defaults.get("fused") else "cpu", copy=True)
    if known == "groups":
        for group in optimizer.param_groups:
            group[STEP] = int(value)
        return int(value)
    return value.item() if value.dtype in (torch.int64, torch.float64) else value.clone()
