"""Universal checkpoints (`megatron.checkpoints.universal`) of an engine, and back into one.

`tools/reshard_checkpoint.py` makes them from a checkpoint of any (dp, mp, pp, ZeRO). DeepSpeed's
own loader (`checkpoint: {load_universal: true}`) reads them too; `resume` uses the one here, which
executes nothing it reads and serves runs without ZeRO.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.atomic_files import write_text
from megatron.checkpoints import optimizer_view, read_checkpoint
from megatron.checkpoints.safe_files import SafeCheckpointEngine
from megatron.checkpoints.sharding import Sharding, canonical_names, with_rows
from megatron.checkpoints.universal import (
    INDEX,
    MODEL_STATES,
    OPTIMIZER,
    PARAMETERS,
    STEP,
    WEIGHT,
    States,
    common_step,
    described,
    is_universal,
    model_states,
    optimizer_state,
    other_names,
    parameter_folders,
    read_progress,
    read_states,
    read_weights,
)
from megatron.errors import CheckpointError
from megatron.mpu.collectives import ParallelState, TensorParallel
from megatron.mpu.parallel_layers import whole_shape
from megatron.neox_arguments.model_keys import padded_vocab_size

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

NO_LINKS_HERE = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)  # some file systems


def write_universal_files(
    engine: Any,
    directory: Path,
    parallel: ParallelState,
    args: NeoXArgs,
    progress: dict[str, Any],
) -> None:
    """Write this rank's share of a universal checkpoint into `directory` (a global_stepN).

    A write that fails is for `finish` to raise: the ranks meet in collectives between their files.
    """
    sharding = Sharding.of(args.model, neox=False)
    names = canonical_names(engine.module)
    writes = parallel.dp_rank == 0 and parallel.tp.rank == 0
    files: SafeCheckpointEngine = engine.checkpoint_engine
    step: Tensor | None = None
    for parameter, states in optimizer_view.read(engine):
        name = names[parameter]
        step = states.get(STEP)
        whole = {key: _joined(name, value, sharding, parallel.tp) for key, value in states.items()}
        # A tied embedding lies on the last stage too.
        is_copy = name.startswith("0.") and parallel.pp_rank > 0
        if writes and not is_copy:
            folder = directory / PARAMETERS / name
            files.makedirs(str(folder), exist_ok=True)
            for key, value in whole.items():
                content = value if key == STEP else described(name, value, sharding)
                files.save(content, str(folder / f"{key}.pt"))
            others = other_names(name, tied=not args.model.no_weight_tying)
            files.attempt(partial(_link, folder, others))
    if dist.get_rank() == 0:
        groups = engine.basic_optimizer.param_groups
        files.save(optimizer_state(groups, step), str(directory / PARAMETERS / OPTIMIZER))
        for file in MODEL_STATES:
            files.save(model_states(progress), str(directory / file))
        text = json.dumps({"format": 1, **progress}, indent=1)
        files.attempt(lambda: write_text(directory / INDEX, text))


def progress_of(engine: Any, step: int, consumed_samples: int, vocab_size: int) -> dict[str, Any]:
    """Where training stands, and the vocabulary before padding."""
    return {
        "iteration": step,
        "consumed_samples": consumed_samples,
        "schedule": engine.lr_scheduler.state_dict(),
        "skipped_steps": engine.skipped_steps,
        "vocab_size": vocab_size,
    }


def _joined(name: str, value: Tensor, sharding: Sharding, tp: TensorParallel) -> Tensor:
    """All tensor-parallel ranks' slices as one; scalars (the step count) as they are."""
    if tp.size == 1 or value.dim() == 0:
        return value
    shards = [torch.empty_like(value) for _ in range(tp.size)]
    dist.all_gather(shards, value.contiguous(), group=tp.group)
    return sharding.merge(name, shards).contiguous()


def _link(folder: Path, others: list[str]) -> None:
    """DeepSpeed's loader looks for a folder under the name in its module; ours does not."""
    try:
        for other in others:
            (folder.parent / other).symlink_to(folder.name, target_is_directory=True)
    except OSError as error:
        if error.errno not in NO_LINKS_HERE:
            raise


def load_whole(
    engine: Any,
    directory: Path,
    args: NeoXArgs,
    tp: TensorParallel,
    *,
    optimizer: bool,
    schedule: bool,
) -> dict[str, Any]:
    """Set this rank's weights and optimizer from whole tensors; returns where training stood.

    `directory` is a universal checkpoint or, without its optimizer, one of ZeRO 3: DeepSpeed takes
    those weights from the newest checkpoint, whichever was asked for, and executes what it reads.
    """
    progress = read_progress(directory)
    sharding = Sharding.of(args.model, neox=False)
    rows = None  # a vocabulary's under this layout; where the words are not known, all are kept
    if "vocab_size" in progress:
        divisor, parallel = args.model.make_vocab_size_divisible_by, args.parallel
        words = int(progress["vocab_size"])
        rows = padded_vocab_size(words, divisor, parallel.model_parallel_size)
    states: dict[nn.Parameter, States] = {}
    for parameter, name, whole in _whole_states(engine, directory, optimizer=optimizer):
        shape = whole_shape(parameter)
        share = {key: _share(name, v, shape, sharding, tp, rows) for key, v in whole.items()}
        if share[WEIGHT].shape != shape:
            raise CheckpointError(
                f"{directory}: {name} gives {tuple(share[WEIGHT].shape)}, but this config's model "
                f"has {tuple(shape)}; resume with the model settings it was trained with"
            )
        states[parameter] = share
    optimizer_view.write(engine, states)
    engine.global_steps = progress["iteration"]
    engine.global_samples = progress["consumed_samples"]
    engine.skipped_steps = progress["skipped_steps"]
    if schedule:
        engine.lr_scheduler.load_state_dict(progress["schedule"])
    return progress


def _whole_states(
    engine: Any, directory: Path, *, optimizer: bool
) -> Iterator[tuple[nn.Parameter, str, States]]:
    """This rank's parameters, their names, and what the checkpoint holds for them."""
    there: Any
    if optimizer:
        there = parameter_folders(directory)
    elif is_universal(directory):
        there = read_weights(directory)
    else:
        there = read_checkpoint(directory).weights
    step = cache(partial(common_step, directory))
    is_adam = "betas" in engine.basic_optimizer.defaults
    for parameter, name in canonical_names(engine.module).items():
        if name not in there:
            raise CheckpointError(f"{directory}: holds no {name}, which this config's model has")
        states = read_states(there[name]) if optimizer else {WEIGHT: there[name].detach()}
        if "exp_avg" in states and STEP not in states:  # DeepSpeed's converter, from ZeRO 3
            states[STEP] = step()
        if len(states) > 1 and is_adam != ("exp_avg" in states):
            raise CheckpointError(
                f"{directory} was trained with another kind of optimizer than optimizer.type asks "
                f"for (it holds {', '.join(sorted(states))}); set that one, or no_load_optim: true"
            )
        yield parameter, name, states


def _share(
    name: str,
    value: Tensor,
    shape: torch.Size,
    sharding: Sharding,
    tp: TensorParallel,
    rows: int | None,
) -> Tensor:
    """This rank's part, of shape `shape`, of a whole tensor; a vocabulary has `rows` here."""
    if value.dim() == 0:
        return value
    if value.dim() == 1 and len(shape) > 1:  # DeepSpeed's converter flattens what ZeRO 3 saved
        whole, dim = list(shape), sharding.dim(name)
        if dim is not None:
            whole[dim] *= tp.size
        value = value.view(whole) if value.numel() == torch.Size(whole).numel() else value
    if rows is not None and sharding.has_vocabulary_rows(name):
        value = with_rows(value, rows)
    return sharding.split(name, value, tp.rank, tp.size)
