"""Checkpoint files are data, not programs: tensors and plain containers, and nothing that runs.

Everything goes through `torch.load(weights_only=True)`. Training states of DeepSpeed also hold
NumPy's random state and a few plain classes; those are named here one by one.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.checkpoints.errors import CheckpointError

__all__ = ["load_file"]

SafeGlobal = Callable[..., Any] | tuple[Callable[..., Any], str]


def _numpy_globals() -> list[SafeGlobal]:
    """What an array of NumPy 1 or 2 is pickled with."""
    reconstruct = np._core.multiarray._reconstruct  # type: ignore[attr-defined]
    scalar = np._core.multiarray.scalar  # type: ignore[attr-defined]
    old = "numpy.core.multiarray"
    return [
        np.ndarray,
        np.dtype,
        *{type(np.dtype(code)) for code in "?bBhHiIlLqQefd"},
        reconstruct,
        scalar,
        (reconstruct, f"{old}._reconstruct"),
        (scalar, f"{old}.scalar"),
    ]


def _deepspeed_globals() -> list[SafeGlobal]:
    """Plain attribute holders of optimizer states."""
    try:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address
    except ImportError:
        return []
    return [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


def load_file(path: Path, *, training_state: bool = False) -> dict[str, Any]:
    """The mapping stored in one `.pt` file, on the CPU.

    `training_state` also admits random states and DeepSpeed's loss scalers.
    """
    allowed = [*_numpy_globals(), *_deepspeed_globals()] if training_state else []
    try:
        with torch.serialization.safe_globals(allowed):
            content = _load(path)
    except pickle.UnpicklingError as error:
        raise CheckpointError(_refusal(path, error)) from error
    except (OSError, RuntimeError, EOFError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({_first_line(error)}); it may be incomplete: copy or save "
            "it again"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path}: holds a {type(content).__name__}, not a mapping of names to tensors"
        )
    return content


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # files from before torch 1.6 cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True)


def _refusal(path: Path, error: Exception) -> str:
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (ValueError, RuntimeError, OSError):
        unsafe = []
    what = f"objects of {', '.join(unsafe)}" if unsafe else _first_line(error)
    return (
        f"{path}: refused, it holds more than tensors and plain data ({what}). Loading them would "
        "run code of the file. If you trust its origin, save its tensors again with torch.save."
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
