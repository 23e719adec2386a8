"""What one Slurm array task does; also usable by hand to repeat a single task."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path

from megatron.reproduce.commands import Launcher
from megatron.reproduce.errors import ReproduceError
from megatron.reproduce.execute import EXIT_REQUEUE, Children, execute_run, prepare_data, tail
from megatron.reproduce.run_files import RunState, State, prepare_run
from megatron.reproduce.suite import Run, Suite

__all__ = ["run_task"]


def run_task(suite: Suite, root: Path, stage: str, name: str, container: str | None) -> int:
    """Prepare a data set, or train or evaluate a run; the exit code for the batch script."""
    children = Children()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        # srun passes USR1 on to its tasks; on TERM it would end them without a chance to save.
        signal.signal(number, lambda *_: children.stop(signal.SIGUSR1))
    if stage == "data":
        return _data_task(children, suite, root, name)
    run = _named_run(suite, name)
    directory = suite.run_directory(root, run)
    prepare_run(directory, suite.name, run)
    launcher = Launcher(srun=True, container=shlex.split(container or ""))
    state = execute_run(
        children,
        launcher,
        directory,
        run,
        {},
        only_steps=lambda step: (step == "train") == (stage == "train"),
    )
    return _exit_code(directory, run, state, stage)


def _data_task(children: Children, suite: Suite, root: Path, name: str) -> int:
    users = [run for run in suite.runs if run.data == name]
    if not users:
        raise ReproduceError(f"suite {suite.name} has no data set {name!r}")
    log = root / suite.name / "logs" / f"prepare-{name}.log"
    prepare_data(children, suite.data[name], users[0], log, {})
    return EXIT_REQUEUE if children.stopping else 0


def _named_run(suite: Suite, name: str) -> Run:
    for run in suite.runs:
        if run.name == name:
            return run
    raise ReproduceError(f"suite {suite.name} has no run {name!r}: it changed after submission")


def _exit_code(directory: Path, run: Run, state: RunState, stage: str) -> int:
    if state.state == State.INTERRUPTED:
        print(f"{run.name}: {stage} interrupted, exit code {EXIT_REQUEUE}", flush=True)
        return EXIT_REQUEUE
    if state.state == State.FAILED:
        log = directory / "logs" / f"{state.step}.log"
        print(f"{run.name}: {state.step} failed (exit code {state.exit_code}); {log}:")
        print(tail(log), flush=True)
        return 1
    print(f"{run.name}: {stage} finished", flush=True)
    return 0
