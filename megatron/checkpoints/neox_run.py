"""A GPT-NeoX run as DeepSpeed saved it: optimizer states by parameter, and its progress.

    ZeRO 0, fp32   mp_rank_MM_model_states.pt holds `optimizer`: Adam's state by number. Parameters
                   are numbered group by group: decayed ones, then biases and norms
    ZeRO 1 or 2    [bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt hold, per group, rank D's part
                   of one vector of all weights, and of each moment; `param_shapes` in the
                   mp_rank file names the parameters in that vector's order

Both with the weights in the mp_rank file (pipe_parallel_size 0) or in layer files (1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.backends.interface import STEP, WEIGHT, States
from megatron.checkpoints.deepspeed_files import optimizer_states
from megatron.checkpoints.reading import CheckpointFiles, find_files, read_shards
from megatron.checkpoints.safe_files import load_mapping
from megatron.checkpoints.saved_config import is_ours, resolved_config
from megatron.checkpoints.sharding import (
    Sharding,
    canonical_shard,
    merge_shards,
    share_positions,
    split_name,
    strip_prefix,
)
from megatron.errors import CheckpointError
from megatron.neox_arguments.model_keys import ModelArgs
from megatron.neox_arguments.optimization_keys import OptimizationArgs

MOMENTS = ("exp_avg", "exp_avg_sq")
_SCHEDULE = {  # DeepSpeed saves GPT-NeoX's scheduler under these names
    "start_lr": "peak",
    "min_lr": "minimum",
    "warmup_iter": "warmup_steps",
    "end_iter": "decay_steps",
    "decay_style": "style",
}
_COUNTS = {
    "iteration": "iteration",
    "consumed_samples": "global_samples",
    "skipped_steps": "skipped_steps",
}
Columns = dict[str, dict[str, Tensor]]
"""State name (fp32, exp_avg, ...) -> parameter -> tensor, of one model-parallel rank."""


def is_neox_run(directory: Path) -> bool:
    """Whether a global_stepN is GPT-NeoX's and holds its optimizer."""
    if is_ours(resolved_config(directory)):
        return False
    files = find_files(directory)
    if files.is_hf or files.is_zero3 or files.is_universal or not files.mp_files:
        return False
    state = load_mapping(files.mp_files[min(files.mp_files)])
    has_schedule = isinstance(state.get("lr_scheduler"), dict)
    return has_schedule and bool(files.zero_optimizer_files or state.get("optimizer"))


def read_neox_states(directory: Path, model: ModelArgs) -> dict[str, States]:
    """Every parameter's fp32 weight, moments and step count, whole, by canonical name."""
    files = find_files(directory)
    ranks = sorted({rank for _, rank in files.layer_files} or files.mp_files)
    if len(files.mp_files) > len(ranks):
        raise CheckpointError(
            f"{directory}: was trained with pipe_parallel_size > 1, whose optimizer files are not "
            "read. Set finetune: true to begin a new run with its weights."
        )
    columns, step = [], torch.tensor(0.0)
    shards = read_shards(files)
    for rank in ranks:
        state = load_mapping(files.mp_files[rank])
        if files.zero_optimizer_files:
            found, step = _of_zero(files, rank, state)
        else:
            found, step = _of_plain(files.mp_files[rank], shards[rank], state)
        columns.append(found)
    wholes = {key: _whole([column[key] for column in columns], model) for key in columns[0]}
    return {
        name: {**{key: whole[name] for key, whole in wholes.items()}, STEP: step}
        for name in wholes[WEIGHT]
    }


def _whole(shards: list[dict[str, Tensor]], model: ModelArgs) -> dict[str, Tensor]:
    """The ranks' shards under canonical names, merged; a kernel shared by all layers once."""
    canonical = [canonical_shard(shard, model) for shard in shards]
    return share_positions(merge_shards(canonical, Sharding.of(model, neox=True)))


def _of_zero(files: CheckpointFiles, rank: int, state: Mapping[str, Any]) -> tuple[Columns, Tensor]:
    """The parts of all data-parallel ranks, joined and cut into parameters."""
    parts: list[dict[str, list[Tensor]]] = []
    step = torch.tensor(0.0)
    for path, content in optimizer_states(files, rank):
        masters, base = content.get("single_partition_of_fp32_groups"), _base(content, path)
        if not isinstance(masters, list) or len(masters) != len(base):
            raise CheckpointError(f"{path}: holds no fp32 groups of ZeRO stage 1 or 2 with Adam")
        parts.append(
            {WEIGHT: masters} | {key: [_moment(s, key, path) for s in base] for key in MOMENTS}
        )
        step = torch.as_tensor(base[0].get(STEP, 0), dtype=torch.float32)
    zero = (state.get("ds_config") or {}).get("zero_optimization") or {}
    if zero.get("round_robin_gradients") and len(parts) > 1:
        raise CheckpointError(
            f"{files.directory}: was trained with round_robin_gradients on {len(parts)} ranks, "
            "whose optimizer files are in another order and not read. Set finetune: true to begin "
            "a new run with its weights."
        )
    groups = state.get("param_shapes") or []
    columns: Columns = {}
    for key in (WEIGHT, *MOMENTS):
        vectors = [
            torch.cat([part[key][n].flatten() for part in parts]) for n in range(len(groups))
        ]
        pairs = zip(groups, vectors, strict=True)
        columns[key] = {
            name: t for shapes, vector in pairs for name, t in _cut(vector, shapes, files)
        }
    return columns, step


def _base(content: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    """The optimizer's state of each group."""
    base = content.get("base_optimizer_state")
    if isinstance(base, list):
        raise CheckpointError(
            f"{path}: was saved with elastic_checkpoint, which is not read. Set finetune: true to "
            "begin a new run with its weights."
        )
    state = (base or {}).get("state") or {}
    return [state[number] for number in sorted(state)]


def _moment(state: Mapping[str, Any], key: str, path: Path) -> Tensor:
    value = state.get(key)
    if not isinstance(value, Tensor):
        raise CheckpointError(f"{path}: holds no {key}; only runs with Adam can be continued")
    return value


def _cut(
    vector: Tensor, shapes: Mapping[str, torch.Size], files: CheckpointFiles
) -> Iterator[tuple[str, Tensor]]:
    """The parameters in a vector of all of a group, whose end is padding."""
    start = 0
    for name, shape in shapes.items():
        stop = start + torch.Size(shape).numel()
        if stop > vector.numel():
            raise CheckpointError(
                f"{files.directory}: the optimizer files hold fewer numbers than the model"
            )
        yield strip_prefix(name, files.directory), vector[start:stop].view(shape)
        start = stop


def _of_plain(
    path: Path, weights: Mapping[str, Tensor], state: Mapping[str, Any]
) -> tuple[Columns, Tensor]:
    """Adam's state by number: matrices first, then biases and norms, each in the model's order."""
    optimizer = state.get("optimizer")
    by_number = optimizer.get("state") if isinstance(optimizer, dict) else None
    if not isinstance(by_number, dict) or not by_number:
        raise CheckpointError(
            f"{path}: its optimizer is not read here (fp16 without ZeRO, or none). Set finetune: "
            "true to begin a new run with its weights."
        )
    learned = _learned(weights)
    plain = [name for name in learned if _is_plain(name)]
    order = [name for name in learned if name not in plain] + plain
    if len(order) != len(by_number):
        raise CheckpointError(f"{path}: {len(by_number)} optimizer states, {len(order)} parameters")
    columns: Columns = {WEIGHT: {name: t.float() for name, t in learned.items()}}
    for key in MOMENTS:
        columns[key] = {name: _moment(by_number[n], key, path) for n, name in enumerate(order)}
        for name, moment in columns[key].items():
            if moment.shape != learned[name].shape:
                raise CheckpointError(f"{path}: {key} of {name} has shape {tuple(moment.shape)}")
    return columns, torch.as_tensor(by_number[0].get(STEP, 0), dtype=torch.float32)


def _is_plain(name: str) -> bool:
    """Whether GPT-NeoX puts it into the group without weight decay."""
    return name.endswith(".bias") or "norm." in name


def _learned(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters without buffers; one that several layers share stands with the first of them."""
    found: dict[str, Tensor] = {}
    shared: set[str] = set()
    for name, tensor in weights.items():
        rest = split_name(name)[1]
        if rest.endswith((".inv_freq", ".slopes")) or rest in shared:
            continue
        if rest.startswith(("attention.rpe.", "word_embeddings.", "position_embeddings.")):
            shared.add(rest)
        found[name] = tensor
    return found


def read_neox_progress(directory: Path, options: OptimizationArgs) -> dict[str, Any]:
    """Step and consumed samples of the run, in the form of our checkpoints."""
    files = find_files(directory)
    path = files.mp_files[min(files.mp_files)]
    state = load_mapping(path)
    saved = state.get("lr_scheduler")
    counts = {key: state.get(theirs) for key, theirs in _COUNTS.items()}
    if (
        not isinstance(saved, dict)
        or "num_iters" not in saved
        or any(type(n) is not int for n in counts.values())
    ):
        raise CheckpointError(f"{path}: holds no step count of the training")
    schedule = {ours: saved[theirs] for theirs, ours in _SCHEDULE.items() if theirs in saved}
    _check_schedule(schedule, options, path)
    return {
        **counts,
        "schedule": {"steps": int(saved["num_iters"]), "schedule": schedule},
    }


def _check_schedule(saved: Mapping[str, Any], options: OptimizationArgs, path: Path) -> None:
    """As GPT-NeoX: another schedule is refused, unless the config chooses one of the two."""
    if options.override_lr_scheduler or options.use_checkpoint_lr_scheduler:
        return
    ours = {
        "peak": options.lr,
        "minimum": options.min_lr,
        "warmup_steps": options.warmup * options.decay_iters,
        "decay_steps": options.decay_iters,
        "style": options.lr_decay_style,
    }
    differing = [
        f"{key} {value} there, {ours[key]} here"
        for key, value in saved.items()
        if value != ours[key]
    ]
    if differing:
        raise CheckpointError(
            f"{path}: its learning-rate schedule is another ({'; '.join(differing)}). Set the same "
            "keys, or override_lr_scheduler: true, or use_checkpoint_lr_scheduler: true."
        )
