"""Start the same Python program in several processes that form one job."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.launcher.environment import free_port
from tests.forked_ranks import ForkedRank

REPOSITORY = Path(__file__).resolve().parent.parent


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    environment = dict(os.environ)
    for name in [n for n in environment if n.startswith("SLURM_")]:
        del environment[name]
    environment.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        DS_ACCELERATOR="cpu",
        PYTHONPATH=os.pathsep.join(
            [str(REPOSITORY), *filter(None, [environment.get("PYTHONPATH")])]
        ),
    )
    return environment


def start_ranks(arguments: Sequence[str], world_size: int) -> list[subprocess.Popen[str]]:
    """All ranks of `python ARGUMENTS`, running; those of a script are forked with their imports."""
    port = free_port()
    if sys.platform == "linux" and not arguments[0].startswith("-"):
        environments = [rank_environment(rank, world_size, port) for rank in range(world_size)]
        return [ForkedRank(arguments, environment) for environment in environments]
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            cwd=REPOSITORY,
            env=rank_environment(rank, world_size, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]


def run_ranks(
    arguments: Sequence[str], world_size: int = 1, *, timeout: float = 300, check: bool = True
) -> list[str]:
    """Wait for all ranks; their outputs. With `check`, a rank that fails fails the test."""
    processes = start_ranks(arguments, world_size)
    outputs = []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=timeout)[0])
    finally:
        for process in processes:
            process.kill()
    if check:
        for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
            assert process.returncode == 0, (
                f"rank {rank} ended with {process.returncode}:\n{output}"
            )
    return outputs
