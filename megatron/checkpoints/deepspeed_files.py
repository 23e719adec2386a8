"""Weights of ZeRO stage 3 checkpoints, which are in DeepSpeed's optimizer shards.

Nothing here imports DeepSpeed: its files are read as data.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.checkpoints.safe_files import load_mapping
from megatron.checkpoints.sharding import strip_prefix
from megatron.errors import CheckpointError

if TYPE_CHECKING:
    from megatron.checkpoints.reading import CheckpointFiles

# ZeRO stage 3: every parameter is partitioned equally over the data-parallel ranks.
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
    for path, optimizer in optimizer_states(files, mp_rank):
        flat = optimizer.get("fp32_flat_groups")
        if flat is None:
            raise CheckpointError(f"{path}: holds no fp32_flat_groups of ZeRO stage 3")
        pieces.append(torch.cat([group.flatten() for group in flat]))
    return pieces


def optimizer_states(files: CheckpointFiles, mp_rank: int) -> Iterator[tuple[Path, dict[str, Any]]]:
    """ZeRO's optimizer states of each data-parallel rank; after the last, an error if some miss."""
    rank, count = 0, None
    while path := files.zero_optimizer_files.get((rank, mp_rank)):
        states = load_mapping(path).get("optimizer_state_dict") or {}
        count = states.get("partition_count", count)
        rank += 1
        yield path, states
    expected = count[0] if isinstance(count, list) and count else count
    if not rank or (isinstance(expected, int) and expected != rank):
        raise CheckpointError(
            f"{files.directory}: {rank} of {expected or 'the'} optimizer files of model-parallel "
            f"rank {mp_rank} are there (ZeRO stage 3 keeps the weights in them); copy all "
            "*_optim_states.pt files"
        )


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
