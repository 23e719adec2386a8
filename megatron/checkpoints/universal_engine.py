"""Universal checkpoints (`megatron.checkpoints.universal`) of an engine, and back into one.

`tools/reshard_checkpoint.py` makes them from a checkpoint of any (dp, mp, pp, ZeRO). DeepSpeed's
own loader (`checkpoint: {load_universal: true}`) reads them too; `resume` uses the one here, which
executes nothing it reads and serves runs without ZeRO.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from megatron.atomic_files import write_text
from megatron.checkpoints import read_checkpoint
from megatron.checkpoints.optimizer_view import joined, place, read
from megatron.checkpoints.safe_files import SafeCheckpointEngine
from megatron.checkpoints.sharding import Sharding, canonical_names
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
    model_states,
    optimizer_state,
    other_names,
    parameter_folders,
    read_progress,
    read_states,
)
from megatron.errors import CheckpointError
from megatron.mpu import ParallelState, TensorParallel
from megatron.tokenizer import padded_vocab_size

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs
    from megatron.neox_arguments.model_keys import ModelArgs

T = TypeVar("T")

NO_LINKS_HERE = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)  # some file systems


def export(
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
    for parameter, states in read(engine):
        name = names[parameter]
        step = states.get(STEP)
        whole = {key: joined(name, value, sharding, parallel.tp) for key, value in states.items()}
        # A tied embedding lies on the last stage too.
        is_copy = name.startswith("0.") and not parallel.is_first_stage
        if writes and not is_copy:
            _write_parameter(files, directory / PARAMETERS, name, whole, sharding)
            links = other_names(name, tied=not args.model.no_weight_tying)
            files.attempt(partial(_link, directory / PARAMETERS, name, links))
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


def _write_parameter(
    files: SafeCheckpointEngine, root: Path, name: str, whole: States, sharding: Sharding
) -> None:
    files.makedirs(str(root / name), exist_ok=True)
    for key, value in whole.items():
        content = value if key == STEP else described(name, value, sharding)
        files.save(content, str(root / name / f"{key}.pt"))


def _link(root: Path, name: str, others: list[str]) -> None:
    """DeepSpeed's loader looks for a folder under the name in its module; ours does not."""
    try:
        for other in others:
            (root / other).symlink_to(name, target_is_directory=True)
    except OSError as error:
        if error.errno not in NO_LINKS_HERE:
            raise


def load_universal(
    engine: Any,
    directory: Path,
    args: NeoXArgs,
    tp: TensorParallel,
    *,
    optimizer: bool,
    schedule: bool,
) -> dict[str, Any]:
    """Set this rank's weights and optimizer from whole tensors; returns where training stood."""
    progress = read_progress(directory)
    folders = parameter_folders(directory)

    step = cache(partial(common_step, directory))

    def whole_states(name: str) -> States:
        states = read_states(_found(name, folders, directory), optimizer=optimizer)
        if "exp_avg" in states and STEP not in states:  # DeepSpeed's converter, from ZeRO 3
            states[STEP] = step()
        _check_optimizer(engine, states, directory)
        return states

    padded = _padded_vocabulary(progress, args)
    sharding = Sharding.of(args.model, neox=False)
    place(engine, whole_states, sharding, tp, directory, padded_vocabulary=padded)
    continue_from(engine, progress, schedule=schedule)
    return progress


def load_zero3_weights(
    engine: Any, directory: Path, model: ModelArgs, tp: TensorParallel, *, schedule: bool
) -> dict[str, Any]:
    """The weights of a checkpoint of ZeRO 3, without its optimizer.

    DeepSpeed takes them from the newest checkpoint, whichever was asked for, and executes what it
    reads.
    """
    weights = read_checkpoint(directory).weights

    def whole_weight(name: str) -> States:
        return {WEIGHT: _found(name, weights, directory).detach()}

    place(engine, whole_weight, Sharding.of(model, neox=False), tp, directory)
    progress = read_progress(directory)
    continue_from(engine, progress, schedule=schedule)
    return progress


def _check_optimizer(engine: Any, states: States, directory: Path) -> None:
    is_adam = "betas" in engine.basic_optimizer.defaults
    if len(states) > 1 and is_adam != ("exp_avg" in states):
        raise CheckpointError(
            f"{directory} was trained with another kind of optimizer than optimizer.type asks for "
            f"(it holds {', '.join(sorted(states))}); set that one, or no_load_optim: true"
        )


def _found(name: str, there: Mapping[str, T], directory: Path) -> T:
    if name not in there:
        raise CheckpointError(f"{directory}: holds no {name}, which this config's model has")
    return there[name]


def continue_from(engine: Any, progress: dict[str, Any], *, schedule: bool) -> None:
    """Set DeepSpeed's counters and, if asked for, the schedule."""
    engine.global_steps = int(progress["iteration"])
    engine.global_samples = int(progress["consumed_samples"])
    engine.skipped_steps = int(progress["skipped_steps"])
    if schedule:
        engine.lr_scheduler.load_state_dict(progress["schedule"])


def _padded_vocabulary(progress: dict[str, Any], args: NeoXArgs) -> int | None:
    """The rows that the same words have under this layout; None: not known, keep all."""
    if "vocab_size" not in progress:
        return None
    return padded_vocab_size(
        int(progress["vocab_size"]),
        args.model.make_vocab_size_divisible_by,
        args.parallel.model_parallel_size,
    )
