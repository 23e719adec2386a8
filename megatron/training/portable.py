"""Checkpoints that any layout can resume: one file per parameter, whole, in fp32, with its moments.

    save/global_step20/portable.json                       what it is and where training stood
    save/global_step20/portable/2.mlp.dense_h_to_4h.weight.pt    {fp32, exp_avg, exp_avg_sq, step}

`tools/reshard_checkpoint.py` makes them from a checkpoint of any (dp, mp, pp, ZeRO); `resume` reads
them. This is DeepSpeed's universal format in spirit; ours because DeepSpeed's reads pickles that
may execute and knows no run without ZeRO.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.checkpoints.checkpoint import strip_prefix
from megatron.checkpoints.sharding import Sharding
from megatron.model.spec import ModelSpec
from megatron.mpu import ParallelState, TensorParallel
from megatron.training.checkpoint_store import CheckpointStore, tag_of, write_text_atomically
from megatron.training.engine import zero_stage_in_effect
from megatron.training.optimizer_view import WEIGHT, States, read, write
from megatron.training.safe_files import CheckpointError, safe_load, synced_save

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

INDEX = "portable.json"
FOLDER = "portable"
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
        # Without ZeRO every replica holds everything, and their number is free.
        "data_parallel_size": plan.data_parallel_size if zero else None,
        "world_size": world_size,
    }


def write_layout(directory: Path, args: NeoXArgs) -> None:
    """Beside each checkpoint: the layout that its files were written under."""
    text = json.dumps(layout_of(args, dist.get_world_size()), indent=1)
    write_text_atomically(directory / LAYOUT, text)


def check_layout(directory: Path, args: NeoXArgs) -> None:
    """A clear error, with the command to run, instead of a failed load."""
    try:
        saved = json.loads((directory / LAYOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # written by GPT-NeoX or by an earlier version
    now = layout_of(args, dist.get_world_size())
    differing = [
        f"{key} {saved.get(key)} -> {value}"
        for key, value in now.items()
        if key != "world_size" and saved.get(key) != value
    ]
    if differing:
        raise CheckpointError(
            f"{directory} was written under another layout ({', '.join(differing)}). Run\n"
            f"  python tools/reshard_checkpoint.py {directory.parent} NEW_DIRECTORY\n"
            "and set `load: NEW_DIRECTORY`; a portable checkpoint resumes under any layout."
        )


def is_portable(directory: Path) -> bool:
    return (directory / INDEX).is_file()


def export(
    engine: Any,
    store: CheckpointStore,
    step: int,
    parallel: ParallelState,
    args: NeoXArgs,
    consumed_samples: int,
) -> None:
    """Write this rank's share of a portable checkpoint into the staging directory."""
    folder = store.staging / tag_of(step) / FOLDER
    sharding = Sharding.of(ModelSpec.from_args(args, 0), neox=False)
    names = canonical_names(engine.module)
    folder.mkdir(parents=True, exist_ok=True)
    writes = parallel.dp_rank == 0 and parallel.tp.rank == 0
    for parameter, states in read(engine):
        name = names[parameter]
        whole = {key: _whole(name, value, sharding, parallel.tp) for key, value in states.items()}
        # A tied embedding lies on the last stage too.
        is_copy = name.startswith("0.") and not parallel.is_first_stage
        if writes and not is_copy:
            synced_save(whole, folder / f"{name}.pt")
    if dist.get_rank() == 0:
        index = {
            "format": 1,
            "iteration": step,
            "consumed_samples": consumed_samples,
            "schedule": engine.lr_scheduler.state_dict(),
            "skipped_steps": engine.skipped_steps,
        }
        write_text_atomically(folder.parent / INDEX, json.dumps(index, indent=1))


def _whole(name: str, value: Tensor, sharding: Sharding, tp: TensorParallel) -> Tensor:
    """All tensor-parallel ranks' slices as one; scalars (the step count) as they are."""
    if tp.size == 1 or value.dim() == 0:
        return value
    shards = [torch.empty_like(value) for _ in range(tp.size)]
    dist.all_gather(shards, value.contiguous(), group=tp.group)
    return sharding.merge(name, shards).contiguous()


def load_portable(
    engine: Any,
    directory: Path,
    spec: ModelSpec,
    tp: TensorParallel,
    *,
    optimizer: bool,
    schedule: bool,
) -> dict[str, Any]:
    """Set this rank's weights and optimizer from whole tensors; returns the index."""
    index: dict[str, Any] = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    sharding = Sharding.of(spec, neox=False)
    states: dict[nn.Parameter, States] = {}
    for parameter, name in canonical_names(engine.module).items():
        whole = _read_parameter(directory / FOLDER / f"{name}.pt", name)
        if not optimizer:
            whole = {WEIGHT: whole[WEIGHT]}
        share = {
            key: value if value.dim() == 0 else sharding.split(name, value, tp.rank, tp.size)
            for key, value in whole.items()
        }
        expected = torch.Size(getattr(parameter, "ds_shape", parameter.shape))
        if share[WEIGHT].shape != expected:
            raise CheckpointError(
                f"{directory}: {name} gives {tuple(share[WEIGHT].shape)}, but this config's model "
                f"has {tuple(expected)}; resume with the model settings it was trained with"
            )
        states[parameter] = share
    write(engine, states)
    engine.global_steps = int(index["iteration"])
    engine.global_samples = int(index["consumed_samples"])
    engine.skipped_steps = int(index["skipped_steps"])
    if schedule:
        engine.lr_scheduler.load_state_dict(index["schedule"])
    return index


def _read_parameter(path: Path, name: str) -> States:
    states = safe_load(path)
    if not isinstance(states, dict) or WEIGHT not in states:
        raise CheckpointError(f"{path}: holds no fp32 weight for {name}")
    return states


def canonical_names(module: nn.Module) -> dict[nn.Parameter, str]:
    """Each parameter's name in every layout: `<layer index>.<name>`."""
    source = Path("model")
    return {p: strip_prefix(name, source) for name, p in module.named_parameters()}
