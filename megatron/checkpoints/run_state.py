"""Files beside DeepSpeed's in a run's checkpoint, written by `saving` and read by `resuming`.

configs/             the user's YAML files, and the resolved config
layout.json          the parallel layout: DeepSpeed's shards fit no other
rng_rank_00000.pt    every rank's random states, as plain data
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.atomic_files import write_text
from megatron.checkpoints.safe_files import load_mapping, read_object
from megatron.checkpoints.saved_config import RESOLVED, resolved_config
from megatron.checkpoints.universal import INDEX
from megatron.errors import CheckpointError
from megatron.mpu.collectives import ParallelState
from megatron.mpu.job import set_seeds
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.optimization_keys import (
    OptimizationArgs,
    data_parallel_size,
    plan_batch,
)
from megatron.neox_arguments.run_keys import ParallelArgs

LAYOUT = "layout.json"


def write_configs(directory: Path, args: NeoXArgs) -> None:
    """The user's files as they are, and the resolved config."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in args.sources.items():
        write_text(directory / Path(name).name, text)
    write_text(directory / RESOLVED, args.to_yaml())


def layout_of(parallel: ParallelArgs, optimization: OptimizationArgs) -> dict[str, Any]:
    """What must be equal for DeepSpeed's own files to fit."""
    world_size, zero = dist.get_world_size(), optimization.zero_stage_in_effect
    return {
        "pipe_parallel_size": parallel.pipe_parallel_size,
        "model_parallel_size": parallel.model_parallel_size,
        "zero_stage": zero,
        "precision": optimization.precision or "fp32",
        # DeepSpeed keeps bf16's fp32 sums in an optimizer, and files, of another kind.
        "grad_accum_dtype": optimization.accumulation_dtype if zero == 1 else None,
        # Without ZeRO every replica holds everything, and their number is free.
        "data_parallel_size": data_parallel_size(parallel, world_size) if zero else None,
        "world_size": world_size,
    }


def write_layout(
    directory: Path,
    parallel: ParallelArgs,
    optimization: OptimizationArgs,
    data: dict[str, Any] | None = None,
) -> None:
    """Beside each checkpoint: the layout that its files were written under, and `data`'s hashes."""
    content = layout_of(parallel, optimization)
    plan = plan_batch(optimization, parallel, content["world_size"])
    # Not part of the layout, but of what a resumed run is compared with.
    content |= {"train_batch_size": plan.train_batch_size, "data": data}
    write_text(directory / LAYOUT, json.dumps(content, indent=1))


def read_layout(directory: Path) -> dict[str, Any]:
    """The content of layout.json; an error if it is missing or unreadable."""
    path = directory / LAYOUT
    content = read_object(path)
    world_size = content.get("world_size")
    if type(world_size) is not int or not 1 <= world_size <= 1_000_000:
        raise CheckpointError(f"{path}: holds no number of processes")
    return content


def saved_batch_size(directory: Path) -> int | None:
    """Samples per step of the run that wrote this checkpoint; None if unknown."""
    if not (directory / LAYOUT).is_file():
        return None
    layout = read_layout(directory)
    if isinstance(layout.get("train_batch_size"), int):
        return int(layout["train_batch_size"])
    saved = resolved_config(directory)
    if isinstance(saved.get("train_batch_size"), int):
        return int(saved["train_batch_size"])
    micro = saved.get("train_micro_batch_size_per_gpu")
    accumulation = saved.get("gradient_accumulation_steps", 1)
    if not isinstance(micro, int) or not isinstance(accumulation, int):
        return None
    sizes = [saved.get(f"{kind}_parallel_size", 1) for kind in ("pipe", "model", "sequence")]
    ranks = max(sizes[0], 1) * sizes[1] * sizes[2]
    return micro * accumulation * (int(layout["world_size"]) // ranks)


def saved_data(directory: Path) -> dict[str, Any] | None:
    """Sizes and hashes of the data that this checkpoint was trained on; None if it has none."""
    files = [directory / name for name in (LAYOUT, INDEX) if (directory / name).is_file()]
    data = read_object(files[0]).get("data") if files else None
    return data if isinstance(data, dict) else None


def check_layout(directory: Path, parallel: ParallelArgs, optimization: OptimizationArgs) -> None:
    """A clear error, with the command to run, instead of a failed load."""
    if not (directory / LAYOUT).is_file():
        return  # written by GPT-NeoX or by an earlier version
    saved = read_layout(directory)
    now = layout_of(parallel, optimization)
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


def rng_file(directory: Path) -> Path:
    """This rank's random states in a checkpoint."""
    return directory / f"rng_rank_{dist.get_rank():05d}.pt"


def rng_state() -> dict[str, Any]:
    """The state of every stream of random numbers in this process."""
    legacy: Any = np.random.get_state()
    name, keys, position, has_gauss, gauss = legacy
    version, internal, next_gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
        "python": [version, list(internal), next_gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Continue every stream from a saved state."""
    torch.set_rng_state(state["torch"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, next_gauss = state["python"]
    random.setstate((version, tuple(internal), next_gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def restore_random_states(directory: Path, fresh_seed: int, parallel: ParallelState) -> None:
    """Restore the random states; a rank without saved states gets a new seed."""
    path = rng_file(directory)
    if not path.is_file():
        set_seeds(fresh_seed, parallel)
        return
    state = load_mapping(path)
    try:
        set_rng_state(state)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: holds no random states ({type(error).__name__}: {error}); set "
            "no_load_rng: true to start new streams"
        ) from error
