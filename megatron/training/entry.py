"""The outermost layer of train.py: errors that a user can fix come without a traceback."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from megatron.atomic_files import check_folder_writable
from megatron.checkpoints.store import CheckpointStore
from megatron.errors import ConfigError, KerpleError, NonFiniteError
from megatron.launcher.environment import environment_for, processes_here, rank_place
from megatron.machine import keep_freed_memory, memory_bytes
from megatron.model.sizes import ModelSizes
from megatron.mpu.job import current_device, join_job
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.allowed_code import allow_flags
from megatron.terminal import (
    EXIT_USER_ERROR,
    describe_error,
    print_next_command,
    show_traceback_if_asked,
    shown_command,
)
from megatron.training.control_hooks import EXIT_DIVERGED
from megatron.training.liveness import bounded_join, exit_or_raise, start_heartbeat
from megatron.training.run import train


def run_and_report(args: NeoXArgs) -> int:
    """Train; 0 when finished, 2 for mistakes in config, data or checkpoints.

    The other codes are those of `control_hooks` and `liveness`; docs/reliability.md lists all.
    """
    rank = environment_for(args.launcher, environ=dict(os.environ)).rank
    with text_log(args.logging.log_dir, rank):
        return _run(args, rank)


def _run(args: NeoXArgs, rank: int) -> int:
    heartbeat, finished = None, False
    try:
        if args.checkpoint.save and rank == 0:
            check_folder_writable(Path(args.checkpoint.save), "save =")
        minutes = args.runtime.distributed_timeout_minutes
        with bounded_join(minutes):
            join_job(args)
            check_memory(ModelSizes(args))
            heartbeat = start_heartbeat(minutes)
        if current_device().type == "cpu":
            keep_freed_memory()
        code = train(args)
        finished = True
    except NonFiniteError as error:
        _print_error(error, rank)
        return EXIT_DIVERGED
    except BrokenPipeError:
        raise  # the reader of our output has left, as `| head` does: `run_command` knows how to end
    except (KerpleError, OSError, ModuleNotFoundError) as error:
        if describe_error(error) is None:
            raise
        _print_error(error, rank)
        if heartbeat is not None:
            heartbeat.tell_code(EXIT_USER_ERROR)
        return EXIT_USER_ERROR
    except RuntimeError as error:
        exit_or_raise(heartbeat, error)
    finally:
        if heartbeat is not None:
            heartbeat.stop(finished=finished)
    trained = args.optimization.train_iters or args.optimization.train_epochs
    if code == 0 and rank == 0 and trained and args.checkpoint.save:
        _hint(args.checkpoint.save, allow_flags(args.to_dict()))
    if dist.is_initialized():  # not after an error: leaving the group may wait for peers
        dist.destroy_process_group()
    return code


def _hint(save: str, flags: str) -> None:
    """The likely next command."""
    if CheckpointStore(Path(save)).newest() is not None:
        print_next_command(f"{shown_command('evaluate')} {save}{flags}")


def check_memory(sizes: ModelSizes) -> None:
    """Refuse a model that cannot fit before the allocator, or the system, ends the process."""
    if torch.cuda.is_available():
        available = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        where = torch.cuda.get_device_name()
    else:
        total = memory_bytes()
        if total is None:
            return
        tasks = os.environ.get("SLURM_NTASKS_PER_NODE", "")
        here = processes_here(os.environ) or (int(tasks) if tasks.isdigit() else 0) or 1
        available = total // here
        where = "this machine" if here == 1 else f"each of {here} processes on this machine"
    shortage = sizes.shortage(dist.get_world_size(), available, where)
    if shortage is not None:
        raise ConfigError(shortage)


def _print_error(error: BaseException, rank: int) -> None:
    """`error (rank N): ...`, once for all ranks that would print the same."""
    text = describe_error(error) or str(error)
    if _is_first_to_print(text):
        show_traceback_if_asked(error)
        print(f"error ({rank_place(rank)}): {text}", file=sys.stderr, flush=True)


def _is_first_to_print(text: str) -> bool:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    key = f"kerple/said/{hashlib.sha256(text.encode()).hexdigest()}"
    try:
        return int(dist.distributed_c10d._get_default_store().add(key, 1)) == 1
    except RuntimeError:  # the rank that keeps the store has left
        return True


# `log_dir`: what a rank prints, kept in a file of its own too.


class _Tee:
    """Writes to the terminal and to the file; everything else is the terminal's."""

    def __init__(self, terminal: Any, file: IO[str]) -> None:
        self._terminal, self._file = terminal, file

    def write(self, text: str) -> int:
        self._file.write(text)
        self._file.flush()
        return int(self._terminal.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)


@contextlib.contextmanager
def text_log(directory: str | None, rank: int) -> Iterator[None]:
    """Copy stdout and stderr of this rank to `directory`/rank_00000.log while the block runs."""
    if directory is None:
        yield
        return
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        (folder / f"rank_{rank:05d}.log").open("a", encoding="utf-8") as file,
        contextlib.redirect_stdout(_Tee(sys.stdout, file)),
        contextlib.redirect_stderr(_Tee(sys.stderr, file)),
    ):
        yield
