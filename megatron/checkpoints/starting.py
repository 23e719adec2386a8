"""How a run may start from a checkpoint: resumed by DeepSpeed, or from its weights alone."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoints.errors import CheckpointError
from megatron.checkpoints.layout import Layout, find_layout
from megatron.checkpoints.safe_load import load_file
from megatron.checkpoints.saved_config import is_ours, read_saved_config
from megatron.neox_arguments import NeoXArgs

__all__ = ["is_resumable"]


def is_resumable(path: str | Path, args: NeoXArgs, iteration: int | None = None) -> bool:
    """Whether DeepSpeed can continue this checkpoint under `args` as it lies there.

    It can where the files are ours, have training states, and were written under the same
    model-parallel size and kind of pipeline. Everything else (official KERPLE, GPT-NeoX, Hugging
    Face, another model-parallel size) starts a new run from its weights: `load_weights`.
    """
    layout = find_layout(path, iteration)
    if layout.is_hf:
        return False
    try:
        saved = read_saved_config(layout)
    except CheckpointError:
        return False
    pipelined = args.parallel.pipe_parallel_size >= 1
    return (
        is_ours(saved)
        and layout.mp_size == args.parallel.model_parallel_size
        and bool(layout.layer_files) == pipelined
        and _has_training_state(layout)
    )


def _has_training_state(layout: Layout) -> bool:
    if layout.has_optimizer:
        return True
    first = layout.mp_files.get(0)
    return first is not None and bool(load_file(first, training_state=True).get("optimizer"))
