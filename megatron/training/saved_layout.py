"""The layout that a checkpoint was written under: DeepSpeed's own files fit no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron.atomic_files import write_text
from megatron.training.engine import zero_stage_in_effect
from megatron.training.safe_files import CheckpointError

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

LAYOUT = "layout.json"


def layout_of(args: NeoXArgs, world_size: int) -> dict[str, Any]:
    """What must be equal for DeepSpeed's own files to fit."""
    plan = args.batch_plan(world_size)
    zero = zero_stage_in_effect(args)
    return {
        "pipe_parallel_size": args.parallel.pipe_parallel_size,
        "model_parallel_size": args.parallel.model_parallel_size,
        "zero_stage": zero,
        "precision": args.optimization.precision or "fp32",
        # Without ZeRO every replica holds everything, and their number is free.
        "data_parallel_size": plan.data_parallel_size if zero else None,
        "world_size": world_size,
    }


def write_layout(directory: Path, args: NeoXArgs) -> None:
    """Beside each checkpoint: the layout that its files were written under."""
    text = json.dumps(layout_of(args, dist.get_world_size()), indent=1)
    write_text(directory / LAYOUT, text)


def check_layout(directory: Path, args: NeoXArgs) -> None:
    """A clear error, with the command to run, instead of a failed load."""
    try:
        saved = json.loads((directory / LAYOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # written by GPT-NeoX or by an earlier version
    now = layout_of(args, dist.get_world_size())
    differing = [
        f"{key} {saved.get(key)} -> {value}"
        for key, value in now.items()
        if key != "world_size" and saved.get(key) != value
    ]
    if differing:
        raise CheckpointError(
            f"{directory} was written under another layout ({', '.join(differing)}). Run\n"
            f"  python tools/reshard_checkpoint.py {directory.parent} NEW_DIRECTORY\n"
            "and set `load: NEW_DIRECTORY`; a universal checkpoint resumes under any layout."
        )
