"""Whole tensors by canonical name, and the share of them that this rank's engine holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.checkpoints.names import strip_prefix
from megatron.checkpoints.sharding import Sharding, with_rows
from megatron.model.spec import ModelSpec
from megatron.mpu import TensorParallel
from megatron.training.optimizer_view import WEIGHT, States, write
from megatron.training.safe_files import CheckpointError

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs


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
    args: NeoXArgs,
    tp: TensorParallel,
    source: Path,
    *,
    padded_vocabulary: int | None = None,
) -> None:
    """Set the engine's weights, and the optimizer's states that are given, from whole tensors.

    `padded_vocabulary`: rows that a vocabulary has here, if its padding may differ from the source.
    """
    sharding = Sharding.of(ModelSpec.from_args(args, 0), neox=False)
    states: dict[nn.Parameter, States] = {}
    for parameter, name in canonical_names(engine.module).items():
        shape = torch.Size(getattr(parameter, "ds_shape", parameter.shape))
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
