"""ZeRO stage 3: every parameter lies in equal pieces on the data-parallel ranks.

Rank r's flat fp32 vector holds its piece of each parameter in turn, the last one padded::

    rank 0   [ a0 a1 | b0 b1 b2 | ... ]        a has 4 numbers, b has 5:
    rank 1   [ a2 a3 | b3 b4 -- | ... ]        pieces of ceil(4/2) = 2 and ceil(5/2) = 3
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoints.reading import Layout
from megatron.checkpoints.safe_files import load_mapping
from megatron.checkpoints.sharding import strip_prefix
from megatron.errors import CheckpointError

__all__ = ["read_zero3_shards"]


def read_zero3_shards(layout: Layout) -> list[dict[str, Tensor]]:
    """Each model-parallel rank's tensors, whole, in fp32, named `<index>.<name>`."""
    shards = []
    for mp_rank in range(layout.mp_size):
        shapes = _shapes(layout, mp_rank)
        pieces = _flat_pieces(layout, mp_rank)
        whole = _join(shapes, pieces, layout.directory)
        shards.append(
            {strip_prefix(name, layout.directory): tensor for name, tensor in whole.items()}
        )
    return shards


def _shapes(layout: Layout, mp_rank: int) -> dict[str, torch.Size]:
    path = layout.zero_model_files.get((0, mp_rank))
    if path is None:
        raise CheckpointError(
            f"{layout.directory}: zero_pp_rank_0_mp_rank_{mp_rank:02d}_model_states.pt is missing"
        )
    state = load_mapping(path)
    if state.get("frozen_param_shapes"):
        raise CheckpointError(
            f"{path}: holds frozen parameters; merge it with DeepSpeed's zero_to_fp32.py first"
        )
    groups: list[dict[str, torch.Size]] = state.get("param_shapes") or []
    return {name: shape for group in groups for name, shape in group.items()}


def _flat_pieces(layout: Layout, mp_rank: int) -> list[Tensor]:
    """Each data-parallel rank's vector, its parameter groups one after the other."""
    paths: dict[int, Path] = {
        dp_rank: path
        for (dp_rank, rank), path in layout.zero_optimizer_files.items()
        if rank == mp_rank
    }
    pieces: list[Tensor] = []
    count = None
    for dp_rank in range(max(paths, default=-1) + 1):
        if dp_rank not in paths:
            break
        state: dict[str, Any] = load_mapping(paths[dp_rank])
        optimizer = state.get("optimizer_state_dict") or {}
        flat = optimizer.get("fp32_flat_groups")
        if flat is None:
            raise CheckpointError(f"{paths[dp_rank]}: holds no fp32_flat_groups of ZeRO stage 3")
        count = optimizer.get("partition_count", count)
        pieces.append(torch.cat([group.flatten() for group in flat]))
    if not pieces or (isinstance(count, int) and count != len(pieces)):
        raise CheckpointError(
            f"{layout.directory}: a ZeRO stage 3 checkpoint keeps its weights in the optimizer "
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
        result[name] = torch.cat(parts)[:numel].view(shape)
        start += length
    return result
