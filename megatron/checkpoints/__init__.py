"""Checkpoints: reading and converting models of any origin; runs use `saving` and `resuming`."""

from __future__ import annotations

from megatron.checkpoints.placing import load_weights, place_weights
from megatron.checkpoints.reading import Checkpoint, CheckpointFiles, find_files, read_checkpoint
from megatron.errors import CheckpointError

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointFiles",
    "find_files",
    "load_weights",
    "place_weights",
    "read_checkpoint",
]
