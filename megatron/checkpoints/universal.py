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

from pathlib import Path

from torch import Tensor

from megatron.checkpoints.safe_files import load_file
from megatron.checkpoints.weight_names import strip_prefix
from megatron.errors import CheckpointError

__all__ = ["OPTIMIZER", "PARAMETERS", "is_universal", "parameter_folders", "read_weights"]

PARAMETERS = "zero"
OPTIMIZER = "optimizer_state.pt"


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
    weights: dict[str, Tensor] = {}
    for name, folder in parameter_folders(directory).items():
        weight = load_file(folder / "fp32.pt").get("param")
        if not isinstance(weight, Tensor):
            raise CheckpointError(f"{folder / 'fp32.pt'}: holds no tensor under `param`")
        weights[name] = weight
    return weights
