"""The outermost layer of train.py: errors that a user can mend come without a traceback."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch.distributed as dist

from megatron.errors import NonFiniteError
from megatron.mpu.job import join_job
from megatron.training.control_hooks import EXIT_DIVERGED, leave_on_signal_until_started
from megatron.training.liveness import EXIT_PEER_LOST, explain, start_heartbeat
from megatron.training.run import train

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

EXIT_USER_ERROR = 2


def run_and_report(args: NeoXArgs) -> int:
    """Train; 0 when finished, 2 for mistakes in config, data or checkpoints.

    The other codes are those of `hooks.stopping` and `liveness`; docs/reliability.md lists all.
    """
    heartbeat, finished = None, False
    leave_on_signal_until_started()
    try:
        join_job(args)
        heartbeat = start_heartbeat(args.runtime.distributed_timeout_minutes)
        code = train(args)
        finished = True
    except ValueError as error:
        # Config, data, tokenizer, checkpoint and engine errors are all ValueErrors of ours.
        if not type(error).__module__.startswith("megatron."):
            raise
        rank = dist.get_rank() if dist.is_initialized() else 0
        print(f"error (rank {rank}): {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    except NonFiniteError as error:
        print(f"error (rank {dist.get_rank()}): {error}", file=sys.stderr, flush=True)
        return EXIT_DIVERGED
    except RuntimeError as error:
        if not explain(heartbeat, error):
            raise
        sys.stdout.flush()
        os._exit(EXIT_PEER_LOST)  # what is left of the process group would wait for the dead
    finally:
        if heartbeat is not None:
            heartbeat.stop(finished=finished)
    if dist.is_initialized():  # after an error, peers may be gone: leave without a farewell
        dist.destroy_process_group()
    return code


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
def text_log(directory: str | None) -> Iterator[None]:
    """Copy stdout and stderr of this rank to `directory`/rank_00000.log while the block runs."""
    if directory is None:
        yield
        return
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        (folder / f"rank_{rank:05d}.log").open("a", encoding="utf-8") as file,
        contextlib.redirect_stdout(_Tee(sys.stdout, file)),
        contextlib.redirect_stderr(_Tee(sys.stderr, file)),
    ):
        yield
