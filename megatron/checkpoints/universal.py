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

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.backends.deepspeed_processes import uneven_parts, version
from megatron.backends.interface import STEP, WEIGHT, States, full_shape
from megatron.checkpoints.safe_files import load_file, load_mapping, read_object
from megatron.checkpoints.sharding import Sharding, strip_prefix
from megatron.errors import CheckpointError
from megatron.model.outline import split_name
from megatron.mpu.collectives import gather_objects

PARAMETERS = "zero"
OPTIMIZER = "optimizer_state.pt"
INDEX = "universal.json"
LATEST = "latest_universal"
COUNTS = ("iteration", "consumed_samples", "skipped_steps")
# DeepSpeed looks for the first without ZeRO 3, for the second with it.
MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
INFO = "universal_checkpoint_info"
FORMAT = {"universal_checkpoint_version": 0.4}


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


def read_states(folder: Path) -> States:
    """One parameter's fp32 weight and the optimizer's states."""
    states = {file.stem: _tensor_in(file) for file in sorted(folder.glob("*.pt"))}
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
    """The training progress: from our index, or from DeepSpeed's own file."""
    names = [name for name in (INDEX, *MODEL_STATES) if (directory / name).is_file()]
    if not names:
        raise CheckpointError(f"{directory}: neither {INDEX} nor {MODEL_STATES[0]} is there")
    file = directory / names[0]
    content = read_object(file) if file.name == INDEX else load_mapping(file)
    if file.name == INDEX and content.get("format") != 1:
        raise CheckpointError(f"{file}: is not format 1 of a universal checkpoint's index")
    schedule = "schedule" if file.name == INDEX else "lr_scheduler"
    if schedule not in content or any(type(content.get(key)) is not int for key in COUNTS):
        raise CheckpointError(
            f"{file}: holds no training progress ({', '.join(COUNTS)}, {schedule}); only "
            "checkpoints of train.py can be resumed"
        )
    kept = {key: content[key] for key in (*COUNTS, "vocab_size") if key in content}
    return {**kept, "schedule": content[schedule]}


# What DeepSpeed needs of a model to write or read its universal checkpoints.

TIED = "tied_modules."


def described(name: str, whole: Tensor, sharding: Sharding) -> dict[str, Any]:
    """A whole tensor and how tensor parallelism cuts it, as DeepSpeed's loader expects it."""
    entry: dict[str, Any] = {"param": whole}
    facts = sharding.facts(name)
    if facts.split is not None:
        entry["cat_dim"] = facts.split
    parts = facts.part_sizes(whole.shape)
    if len(set(parts)) > 1:
        shape = (tuple(parts), *whole.shape[1:])
        entry["sub_param_shape"] = uneven_parts(shape)
    elif len(parts) > 1:
        entry["param_n_sub_params"] = len(parts)
    if facts.is_split_vocabulary:
        entry["vocab_tensor"] = True
    return entry


def other_names(name: str, *, tied: bool) -> list[str]:
    """What modules call a canonical name: a plain model, and a pipeline with a tied embedding."""
    index, rest = split_name(name)
    return [f"sequential.{name}", *([f"{TIED}embedding.{rest}"] if tied and index == 0 else [])]


def attach_universal_info(module: nn.Module, sharding: Sharding, tp_size: int) -> None:
    """Set the module attribute that `ds_to_universal` reads; DeepSpeed saves it."""
    own = {name: tuple(full_shape(p)) for name, p in module.named_parameters()}
    shapes = {name: shape for stage in gather_objects(own) for name, shape in stage.items()}
    setattr(module, INFO, conversion_info(shapes, sharding, tp_size))


def conversion_info(
    shapes: Mapping[str, tuple[int, ...]], sharding: Sharding, tp_size: int
) -> dict[str, Any]:
    """Patterns of parameter names by how their tensor-parallel slices are joined."""
    names: dict[str, set[str]] = {
        "tp_replicated_parameter_patterns": set(),
        "parameter_with_row_parallelism_patterns": set(),
        "parameter_with_2_sub_params_cat_dim_0": set(),
        "vocabulary_parameter_patterns": set(),
        "pipeline_replicated_parameter_patterns": set(),
    }
    rows, uneven, widths = 0, {}, {}
    for name, shape in shapes.items():
        canonical = strip_prefix(name, Path("model"))
        pattern, facts = _pattern(name, canonical), sharding.facts(canonical)
        parts = facts.part_sizes(shape)
        if facts.split is None:
            names["tp_replicated_parameter_patterns"].add(pattern)
        elif facts.split == 1:
            names["parameter_with_row_parallelism_patterns"].add(pattern)
        if len(set(parts)) > 1:  # queries, keys and values of grouped heads
            whole = (tuple(part * tp_size for part in parts), *shape[1:])
            uneven[pattern] = {"patterns": [pattern], "shape": whole, "partition_dim": 0}
            widths[pattern] = [[part] * tp_size for part in parts]
        elif len(parts) == 2:
            names["parameter_with_2_sub_params_cat_dim_0"].add(pattern)
        if facts.is_split_vocabulary:
            names["vocabulary_parameter_patterns"].add(pattern)
            rows = max(rows, shape[0])
        if name.startswith(TIED):  # the embedding of a tied head is on the last stage too
            names["pipeline_replicated_parameter_patterns"].add(pattern)
    info = {
        **FORMAT,
        # DeepSpeed drops the rows from here on. Rows of padding are trained like others: keep all.
        "original_vocab_size": rows * tp_size,
        **{key: sorted(found) for key, found in names.items()},
    }
    if uneven:
        info["parameter_with_sub_params"] = list(uneven.values())
        info["sub_param_shard_widths"] = widths
    return info


def _pattern(name: str, canonical: str) -> str:
    """One expression for the same parameter of all layers; DeepSpeed wants every one used."""
    if name.startswith(TIED):
        return f"{re.escape(name)}$"
    index, rest = split_name(canonical)
    # kernels of two layers may be split along different dimensions
    layer = index if rest.startswith("positions.") else r"\d+"
    return rf"(sequential\.)?{layer}\.{re.escape(rest)}$"


def optimizer_state(param_groups: list[dict[str, Any]], step: Tensor | None) -> dict[str, Any]:
    """zero/optimizer_state.pt: the hyperparameters as ZeRO 1 and 2 read them, and as ZeRO 3 does.

    ZeRO 3 gives the first group's to all, so only what all groups share is there.
    """
    groups = [{k: v for k, v in group.items() if k != "params"} for group in param_groups]
    shared = {k: v for k, v in groups[0].items() if all(group.get(k) == v for group in groups)}
    state = {} if step is None else {0: {"step": step}}
    return {
        "param_groups": groups,
        "optimizer_state_dict": {"state": state, "param_groups": [shared]},
        "ds_version": version(),
    }


def model_states(progress: Mapping[str, Any]) -> dict[str, Any]:
    """The model-states file: the training progress. The weights are under zero/."""
    return {
        "module": None,
        "lr_scheduler": progress["schedule"],
        "global_steps": progress["iteration"],
        "global_samples": progress["consumed_samples"],
        "skipped_steps": progress["skipped_steps"],
        "dp_world_size": 1,
        "mp_world_size": 1,
        "iteration": progress["iteration"],
        "consumed_samples": progress["consumed_samples"],
        "ds_version": version(),
        INFO: FORMAT,
    }
