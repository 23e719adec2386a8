"""Where a run starts: at step 0, from its own newest checkpoint, or from other weights.

A directory that holds a run is never overwritten: the run is resumed if the config is unchanged,
and refused otherwise. Rank 0 decides and broadcasts.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.checkpoints.neox_run import is_neox_run
from megatron.checkpoints.reading import CheckpointFiles, at_step, find_files
from megatron.checkpoints.run_lock import lock_directory
from megatron.checkpoints.run_state import saved_batch_size
from megatron.checkpoints.saved_config import (
    args_from,
    check_agreement,
    check_positions,
    config_to_resume,
    is_ours,
    resolved_config,
)
from megatron.checkpoints.store import CheckpointStore, is_training_checkpoint
from megatron.checkpoints.universal import is_universal
from megatron.errors import CheckpointError, KerpleError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.model_keys import ModelArgs
from megatron.neox_arguments.run_keys import CheckpointArgs
from megatron.terminal import shown_command
from megatron.training.metrics import check_data, finished_at

RUN_FILES = re.compile(
    r"global_step\d+|latest|latest_universal|metrics\.jsonl|manifest\.json|results|\.incomplete"
)
"""Files that training writes into its directory, which `overwrite` moves aside."""


@dataclass(frozen=True)
class Start:
    """How a run starts, the same on all ranks."""

    resume_from: Path | None = None
    """A run of ours, its step below, to continue (or with `finetune`, to take the weights of)."""
    step: int | None = None
    foreign: Path | None = None
    """Weights of another program, or of a conversion."""
    continues: bool = False
    """The run in `save` itself is continued."""
    finished: bool = False
    lines: list[str] = field(default_factory=list)


def run_directory(options: CheckpointArgs) -> Path | None:
    """`save`, where checkpoints, metrics and the manifest go."""
    return Path(options.save) if options.save else None


def plan_start(args: NeoXArgs) -> tuple[NeoXArgs, Start]:
    """Lock the directory, find what to resume, refuse what would overwrite a run.

    The returned config is the one to use: a run older than a key keeps the behaviour of its time.
    """
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [_plan(args, dist.get_world_size())]
        except (KerpleError, OSError) as error:
            answer = [str(error)]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], str):
        raise CheckpointError(answer[0])
    start: Start = answer[0]
    if start.continues and args.checkpoint.finetune:
        args = args.replace(finetune=False)
    if start.resume_from is not None and start.step is not None:
        began = config_to_resume(args, CheckpointStore(start.resume_from).path(start.step))
        if began.optimization.lr_decay_rule != args.optimization.lr_decay_rule:
            start.lines.append(
                "the run is from before lr_decay_rule existed: it keeps its schedule "
                "(override_lr_scheduler: true takes the config's)"
            )
        args = began
    if dist.get_rank() == 0:
        for line in start.lines:
            print(line, flush=True)
    return args, start


def _plan(args: NeoXArgs, world_size: int) -> Start:
    save = run_directory(args.checkpoint)
    trains = args.steps_to_train > 0
    wanted = args.checkpoint.load or (None if trains else "auto")  # else fresh weights are measured
    load = save if wanted == "auto" else Path(wanted) if wanted else None
    lines: list[str] = []
    if save is not None:
        lock_directory(save)
        store = CheckpointStore(save)
        held = trains and args.checkpoint.overwrite and bool(store.steps())
        if held and not _began_by_overwriting(store, args, world_size):
            lines.append(_move_aside(save))
        store.clean()
    if save is not None and trains and CheckpointStore(save).steps():
        start = _continue(save, load, args.checkpoint, args.optimization.train_iters or 0)
    elif load is None or (load == save and not CheckpointStore(load).steps()):
        if trains and args.checkpoint.load_positions == "fresh":
            raise CheckpointError(
                f"load_positions = fresh with load = {args.checkpoint.load}: there is no model to "
                "give new positions to. Set `load` to the trained model, `save` to a new directory."
            )
        if args.checkpoint.iteration is not None and load is not None:
            CheckpointStore(load).find(args.checkpoint.iteration)  # raises if it is missing
        return Start(lines=lines)
    else:
        start = _begin_from(load, args.checkpoint, args.model, trains=trains)
    lines += start.lines
    if start.resume_from is not None and (start.continues or not args.checkpoint.finetune):
        lines += _check(start, args, world_size)
    return replace(start, lines=lines)


def _continue(save: Path, load: Path | None, options: CheckpointArgs, iterations: int) -> Start:
    """`save` holds a run: resume it if it is this config's, else refuse."""
    store = CheckpointStore(save)
    if load == save and options.finetune:
        raise CheckpointError(
            f"save = {save}: holds the run that finetune would start from, and a new run would "
            "overwrite it. Set `save` to another directory."
        )
    elsewhere = load is not None and load != save
    step = store.find(None if elsewhere else options.iteration)
    lines = []
    if step is not None and step >= iterations and (finished_at(save) or -1) >= iterations:
        store.verify(step)
        lines.append(
            f"{save}: already finished (step {step} of {iterations}), nothing is changed. Raise "
            "train_iters to continue, or set another `save`."
        )
        return Start(save, step, continues=True, finished=True, lines=lines)
    if load is None or elsewhere:
        instead = f" instead of starting from load = {load}" if elsewhere else ""
        lines.append(
            f"{save} holds this run already: continuing it after step {step}{instead} "
            "(overwrite: true would start a new run)"
        )
    return Start(save, step, continues=True, lines=lines)


def _begin_from(load: Path, options: CheckpointArgs, model: ModelArgs, *, trains: bool) -> Start:
    store = CheckpointStore(load)
    step = store.find(options.iteration) if store.steps() else None
    if options.load_positions == "fresh":
        find_files(load, options.iteration)
        return Start(foreign=load)
    if step is not None:
        found = store.path(step)
        if is_training_checkpoint(found) or is_universal(found):
            saved = resolved_config(found)
            if saved and "pos_emb" not in (options.allow_changed or ()):
                before = args_from(saved, found)
                begun = at_step(before, step) if options.finetune else before
                check_positions(begun.model, model, found)
            return Start(load, step)
    files = find_files(load, options.iteration)  # raises if it is not a checkpoint
    if step is not None and not options.finetune and is_neox_run(files.directory):
        line = f"{files.directory}: continuing GPT-NeoX's run after step {step}, with its optimizer"
        return Start(load, step, lines=[line])
    if trains and not options.finetune:
        _check_foreign_start(files)
    return Start(foreign=load)


def _check_foreign_start(files: CheckpointFiles) -> None:
    """Refuse to resume another program's run without its optimizer states."""
    of_a_run = not files.is_hf and not is_ours(resolved_config(files.directory))
    if of_a_run and files.step_in_name:
        raise CheckpointError(
            f"load = {files.root}: step {files.step_in_name} of another program's run (GPT-NeoX or "
            "the official KERPLE code) without optimizer files that can be read, so it cannot be "
            "continued. Set finetune: true to begin a new run with its weights."
        )


def _check(start: Start, args: NeoXArgs, world_size: int) -> list[str]:
    """Messages about allowed changes; an error if the config is not the run's."""
    assert start.resume_from is not None
    assert start.step is not None
    directory = CheckpointStore(start.resume_from).path(start.step)
    batch_size = args.batch_plan(world_size).train_batch_size
    try:
        told = check_data(directory, args.data, args.checkpoint.allow_changed or ())
        return told + check_agreement(
            directory,
            config_to_resume(args, directory),
            batch_size=batch_size,
            saved_batch_size=saved_batch_size(directory),
        )
    except CheckpointError as error:
        if not start.continues:
            raise
        raise CheckpointError(
            f"{str(error).rstrip('.')}. overwrite: true would move the run in "
            f"{start.resume_from} aside."
        ) from error


def _move_aside(save: Path) -> str:
    """overwrite: true: move the run's files into a directory beside it."""
    number = 1
    while (aside := save.with_name(f"{save.name}.replaced{number}")).exists():
        number += 1
    aside.mkdir()
    for entry in sorted(save.iterdir(), key=lambda entry: entry.name == "latest"):
        if RUN_FILES.fullmatch(entry.name):
            entry.rename(aside / entry.name)
    return f"overwrite: the run that was in {save} is now in {aside}"


def _began_by_overwriting(store: CheckpointStore, args: NeoXArgs, world_size: int) -> bool:
    """A requeued job is started with overwrite: true again, but must go on with its own run."""
    step = store.newest()
    assert step is not None
    if finished_at(store.directory) is not None:
        return False
    try:
        _check(Start(store.directory, step), args, world_size)
    except CheckpointError:
        return False
    return bool(resolved_config(store.path(step)).get("overwrite"))


def command_to_continue() -> str:
    """The command that resumes this run: the same again."""
    if command := os.environ.get("KERPLE_COMMAND"):  # deepy.py's own
        return command
    arguments = sys.argv[1:]
    if "--megatron_config" in arguments:
        return "the same command again"
    return f"{shown_command('train')} {shlex.join(arguments)}"
