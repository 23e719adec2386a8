"""Random states as plain data, so that they can be saved and read back safely."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.checkpoints.safe_files import load_mapping
from megatron.errors import CheckpointError
from megatron.mpu import ParallelState
from megatron.mpu.job import set_seeds

__all__ = ["continue_streams", "rng_file", "rng_state", "set_rng_state"]


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


def continue_streams(directory: Path, fresh_seed: int, parallel: ParallelState) -> None:
    """Continue the random streams; under another number of ranks, start new ones."""
    path = rng_file(directory)
    if not path.is_file():
        set_seeds(fresh_seed, parallel)
        return
    try:
        set_rng_state(load_mapping(path))
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path}: holds no random states ({type(error).__name__}: {error}); set "
            "no_load_rng: true to start new streams"
        ) from error
