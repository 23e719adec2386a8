"""A DeepSpeed checkpoint engine that executes nothing it reads and syncs what it writes."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from megatron.checkpoints.errors import CheckpointError

__all__ = ["CheckpointError", "SafeCheckpointEngine", "safe_load", "synced_save"]


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
