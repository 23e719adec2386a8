"""DeepSpeed's universal checkpoints: each parameter whole, in fp32, in a folder of its own.

    global_step20/zero/2.mlp.dense_h_to_4h.weight/fp32.pt       {param: Tensor, cat_dim: 0}
    global_step20/zero/2.mlp.dense_h_to_4h.weight/exp_avg.pt    the same for each of Adam's moments
    global_step20/zero/2.mlp.dense_h_to_4h.weight/step.pt       a number
    global_step20/zero/optimizer_state.pt                       rates, betas, decay
    global_step20/mp_rank_00_model_states.pt                    where training stood

DeepSpeed calls a folder what the module calls its parameter: `2.x` in a pipeline, `sequential.2.x`
in a plain model, `tied_modules.embedding.x` for a tied embedding in a pipeline. All are accepted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoints.safe_files import load_file
from megatron.checkpoints.weight_names import strip_prefix
from megatron.errors import CheckpointError

__all__ = [
    "INDEX",
    "LATEST",
    "MODEL_STATES",
    "OPTIMIZER",
    "PARAMETERS",
    "STEP",
    "WEIGHT",
    "States",
    "common_step",
    "is_universal",
    "parameter_folders",
    "progress_in_model_states",
    "read_progress",
    "read_states",
    "read_weights",
]

PARAMETERS = "zero"
OPTIMIZER = "optimizer_state.pt"
INDEX = "universal.json"
LATEST = "latest_universal"
NEEDED = {"iteration", "consumed_samples", "lr_scheduler", "skipped_steps"}
# DeepSpeed looks for the first without ZeRO 3, for the second with it.
MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
STEP = "step"
WEIGHT = "fp32"  # beside the optimizer's own names: exp_avg, exp_avg_sq, step, ...
States = dict[str, Tensor]


def is_universal(directory: Path) -> bool:
    """Whether `directory` (a global_stepN) is such a checkpoint."""
    return (directory / PARAMETERS / OPTIMIZER).is_file()


def parameter_folders(directory: Path) -> dict[str, Path]:
    """Canonical name -> folder, whatever the module that was saved called its parameters."""
    folders: dict[str, Path] = {}
    for folder in sorted((directory / PARAMETERS).iterdir()):
        if folder.is_dir():
            # Digits come first, so that of several names for one folder the canonical one is taken.
            folders.setdefault(strip_prefix(folder.name, directory), folder)
    return folders


def read_weights(directory: Path) -> dict[str, Tensor]:
    """All parameters, whole, by canonical name."""
    folders = parameter_folders(directory)
    return {name: _tensor_in(place / f"{WEIGHT}.pt", mmap=True) for name, place in folders.items()}


def read_states(folder: Path, *, optimizer: bool) -> States:
    """One parameter's fp32 weight and, if asked for, the optimizer's states."""
    files = sorted(folder.glob("*.pt")) if optimizer else [folder / f"{WEIGHT}.pt"]
    states = {file.stem: _tensor_in(file) for file in files}
    if WEIGHT not in states:
        raise CheckpointError(f"{folder}: holds no {WEIGHT}.pt")
    return states


def _tensor_in(file: Path, *, mmap: bool = False) -> Tensor:
    content = load_file(file, mmap=mmap)
    value = content.get("param") if isinstance(content, dict) else content
    if isinstance(value, int | float):
        return torch.tensor(float(value))
    if not isinstance(value, Tensor):
        raise CheckpointError(f"{file}: holds no tensor under `param`")
    return value


def common_step(directory: Path) -> Tensor:
    """The optimizer's step count, where each parameter has none of its own."""
    file = directory / PARAMETERS / OPTIMIZER
    try:
        return torch.as_tensor(load_file(file)["optimizer_state_dict"]["state"][0][STEP])
    except (KeyError, TypeError, IndexError):
        raise CheckpointError(f"{file}: holds no step count of the optimizer") from None


def read_progress(directory: Path) -> dict[str, Any]:
    """Where training stood: our index, or what DeepSpeed's converter copied."""
    if (directory / INDEX).is_file():
        return _index_of(directory / INDEX)
    return progress_in_model_states(directory)


def _index_of(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not readable ({error})") from error
    if not isinstance(content, dict) or content.get("format") != 1:
        raise CheckpointError(f"{file}: is not format 1 of a universal checkpoint's index")
    counts = ("iteration", "consumed_samples", "skipped_steps")
    if not all(type(content.get(key)) is int for key in counts) or "schedule" not in content:
        raise CheckpointError(f"{file}: does not say where training stood")
    return content


def progress_in_model_states(directory: Path) -> dict[str, Any]:
    """Where training stood, from DeepSpeed's own file."""
    file = next((directory / name for name in MODEL_STATES if (directory / name).is_file()), None)
    if file is None:
        raise CheckpointError(f"{directory}: neither {INDEX} nor {MODEL_STATES[0]} is there")
    state = load_file(file)
    if not isinstance(state, dict) or not state.keys() >= NEEDED:
        raise CheckpointError(
            f"{file}: does not say where training stood ({', '.join(sorted(NEEDED))}); only "
            "checkpoints of train.py can be resumed"
        )
    return {"schedule" if key == "lr_scheduler" else key: state[key] for key in NEEDED}
