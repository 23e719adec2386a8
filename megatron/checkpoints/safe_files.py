"""Checkpoint files are data, not programs: tensors and plain containers, and nothing that runs.

Everything goes through `torch.load(weights_only=True)`. Training states of DeepSpeed also hold
NumPy's random state and a few plain classes; those are named here one by one.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from megatron.errors import CheckpointError

__all__ = ["CheckpointError", "SafeCheckpointEngine", "load_file", "safe_load", "synced_save"]

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


# A DeepSpeed checkpoint engine that executes nothing it reads and syncs what it writes.


def allowed_types() -> list[Any]:
    """The only classes, beside tensors and plain containers, that DeepSpeed's files hold."""
    import argparse

    import numpy as np
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [
        LossScaler,
        DynamicLossScaler,
        ZeroStageEnum,
        fragment_address,
        argparse.Namespace,
        torch.Size,
        np.dtype,
        np.ndarray,
        np.dtypes.UInt32DType,
        np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
        (np._core.multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),  # type: ignore[attr-defined]
    ]


def safe_load(path: str | Path, map_location: Any = "cpu") -> Any:
    """torch.load that refuses anything but data."""
    try:
        with torch.serialization.safe_globals(allowed_types()):
            return torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such checkpoint file") from None
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise CheckpointError(
            f"{path}: refused, because it holds more than data ({reason}). "
            "Only tensors, plain containers and DeepSpeed's own state are read."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: damaged or not a checkpoint file ({error})") from error


def synced_save(state: Any, path: str | Path) -> None:
    """torch.save, then wait until the bytes are on the disk."""
    try:
        with Path(path).open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:
        # torch.save loses its place when a write fails, and reports that instead of the reason.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


class SafeCheckpointEngine(TorchCheckpointEngine):
    """What DeepSpeed's engine uses for every file once training has started.

    A write that fails (a full disk) is remembered instead of raised: DeepSpeed's ranks meet in
    barriers between their files, and a rank that left would keep the others waiting.
    """

    def __init__(self) -> None:
        super().__init__()
        self._failure: Exception | None = None

    def begin(self) -> None:
        """Before DeepSpeed saves."""
        self._failure = None

    def finish(self) -> None:
        """After DeepSpeed saved: raise what went wrong meanwhile."""
        if self._failure is not None:
            raise self._failure

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.attempt(lambda: os.makedirs(path, exist_ok=exist_ok))  # noqa: PTH103

    def save(self, state_dict: Any, path: str) -> None:
        self.attempt(lambda: synced_save(state_dict, path))

    def load(self, path: str, map_location: Any = None) -> Any:
        return safe_load(path, map_location)

    def preserves_storage_sharing(self) -> bool:
        return True

    def attempt(self, write: Callable[[], None]) -> None:
        """Write, unless something before it failed; what goes wrong is for `finish`."""
        if self._failure is not None:
            return
        try:
            write()
        except (OSError, RuntimeError) as error:
            self._failure = error
