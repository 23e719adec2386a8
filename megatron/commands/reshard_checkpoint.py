"""Make a universal checkpoint of a run: it resumes under any (dp, mp, pp, ZeRO, precision).

    python tools/reshard_checkpoint.py RUN_DIRECTORY NEW_DIRECTORY [--iteration N]

then train with `load: NEW_DIRECTORY` and the layout of your choice, optimizer included. The files
are those of DeepSpeed's Universal Checkpointing. The old layout's ranks are started here, on this
machine's CPU: it needs memory for the whole model with its optimizer.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.errors import CheckpointError
from megatron.launcher.environment import free_port
from megatron.neox_arguments.command_line import add_allow_kernel_argument
from megatron.terminal import PACKAGE


def plan(source: Path, target: Path, iteration: int | None) -> tuple[int, int]:
    """The step to convert and how many processes its layout has."""
    from megatron.machine import settle_accelerator

    settle_accelerator()
    from megatron.checkpoints.rank_layout import read_layout
    from megatron.checkpoints.store import CheckpointStore
    from megatron.checkpoints.universal import is_universal

    store = CheckpointStore(source)
    step = store.find(iteration)
    if step is None:
        raise CheckpointError(f"{source}: no global_step* checkpoint there")
    if is_universal(store.path(step)):
        raise CheckpointError(f"{store.path(step)} is universal already: set `load: {source}`")
    if target.resolve() == source.resolve():
        raise CheckpointError(f"{target}: choose a directory other than the source")
    try:
        return step, int(read_layout(store.path(step))["world_size"])
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; only checkpoints that train.py wrote can be resharded. For weights alone "
            "use tools/convert_checkpoint.py"
        ) from error


def run_ranks(
    source: Path, target: Path, step: int, world_size: int, kernels: Sequence[str]
) -> int:
    """All ranks of the old layout; the first exit code that is not 0."""
    shared = {
        **{k: v for k, v in os.environ.items() if not k.startswith("SLURM_")},
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "DS_ACCELERATOR": "cpu",
        # The ranks must find the package that this process found.
        "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    command = [sys.executable, "-m", "megatron.training.resharding"]
    command += [str(source.resolve()), str(target.resolve()), str(step), *kernels]
    ranks = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(world_size)
    ]
    try:
        codes = [rank.wait() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return next((code for code in codes if code), 0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="run directory with global_step* folders")
    parser.add_argument("target", type=Path, help="new directory for the universal checkpoint")
    parser.add_argument("--iteration", type=int, help="step to convert (default: the newest)")
    add_allow_kernel_argument(parser)
    options = parser.parse_args(argv)
    step, world_size = plan(options.source, options.target, options.iteration)
    print(f"reading step {step} with {world_size} process(es) ...", flush=True)
    code = run_ranks(options.source, options.target, step, world_size, options.allow_kernel)
    if code == 0:
        from megatron.checkpoints.store import CheckpointStore

        print(f"wrote {CheckpointStore(options.target).path(step)}: set `load: {options.target}`")
    return code
