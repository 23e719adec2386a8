"""Checkpoints of every origin: read, merged, re-split, renamed, written."""

from __future__ import annotations

from megatron.checkpoints.checkpoint import Checkpoint, read_checkpoint
from megatron.checkpoints.errors import CheckpointError
from megatron.checkpoints.layout import Layout, find_layout
from megatron.checkpoints.placing import load_weights, place_weights

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Layout",
    "find_layout",
    "load_weights",
    "place_weights",
    "read_checkpoint",
]
