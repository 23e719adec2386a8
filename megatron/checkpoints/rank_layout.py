"""layout.json: the layout that a checkpoint was written under; DeepSpeed's files fit no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron.atomic_files import write_text
from megatron.errors import CheckpointError
from megatron.neox_arguments.deepspeed_config import accumulation_dtype, zero_stage_in_effect

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

__all__ = ["LAYOUT", "check_layout", "read_layout", "write_layout"]

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
        # DeepSpeed keeps bf16's fp32 sums in an optimizer, and files, of another kind.
        "grad_accum_dtype": accumulation_dtype(args) if zero == 1 else None,
        # Without ZeRO every replica holds everything, and their number is free.
        "data_parallel_size": plan.data_parallel_size if zero else None,
        "world_size": world_size,
    }


def write_layout(directory: Path, args: NeoXArgs) -> None:
    """Beside each checkpoint: the layout that its files were written under."""
    world_size = dist.get_world_size()
    content = layout_of(args, world_size)
    # Not part of the layout, but of what a resumed run is compared with.
    content["train_batch_size"] = args.batch_plan(world_size).train_batch_size
    write_text(directory / LAYOUT, json.dumps(content, indent=1))


def read_layout(directory: Path) -> dict[str, Any]:
    """What was written; an error if it is not there or not readable."""
    path = directory / LAYOUT
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable ({error})") from error
    world_size = content.get("world_size") if isinstance(content, dict) else None
    if type(world_size) is not int or not 1 <= world_size <= 1_000_000:
        raise CheckpointError(f"{path}: does not say how many processes wrote the checkpoint")
    return dict(content)


def check_layout(directory: Path, args: NeoXArgs) -> None:
    """A clear error, with the command to run, instead of a failed load."""
    if not (directory / LAYOUT).is_file():
        return  # written by GPT-NeoX or by an earlier version
    saved = read_layout(directory)
    now = layout_of(args, dist.get_world_size())
    differing = [
        f"{key} {saved.get(key)} -> {value}"
        for key, value in now.items()
        if key != "world_size" and saved.get(key, value) != value
    ]
    if differing:
        raise CheckpointError(
            f"{directory} was written under another layout ({', '.join(differing)}). Run\n"
            f"  python tools/reshard_checkpoint.py {directory.parent} NEW_DIRECTORY\n"
            "and set `load: NEW_DIRECTORY`; a universal checkpoint resumes under any layout."
        )
