"""Carry one run through its steps, in child processes that can be stopped without loss."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron.errors import ReproduceError
from megatron.launcher.environment import free_port
from megatron.neox_arguments.trust import kernels_in
from megatron.paper.run_files import (
    RunState,
    State,
    done_steps,
    expected_steps,
    mark_done,
    read_state,
    write_state,
)
from megatron.paper.suite import DataSource, EvalStep, Run

__all__ = [
    "EXIT_REQUEUE",
    "REPOSITORY",
    "Children",
    "Launcher",
    "evaluate_command",
    "execute_run",
    "prepare_command",
    "prepare_data",
    "train_command",
]

EXIT_REQUEUE = 75
"""train.py saved a checkpoint because of a signal and wants to be started again."""


@dataclass
class Children:
    """The child processes of this process, for passing signals on."""

    processes: set[subprocess.Popen[bytes]] = field(default_factory=set)
    stopping: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> int:
        """Run a command to its end with its output in a log file; the exit code."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            output.write(f"\n$ {' '.join(command)}\n".encode())
            output.flush()
            with self.lock:
                if self.stopping:
                    return EXIT_REQUEUE
                process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=REPOSITORY,
                    env={**os.environ, **environment},
                    start_new_session=True,
                )
                self.processes.add(process)
            try:
                return process.wait()
            finally:
                with self.lock:
                    self.processes.discard(process)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ask every child to save and end; nothing new is started afterwards."""
        with self.lock:
            self.stopping = True
            for process in self.processes:
                if process.poll() is None:
                    _signal_group(process, number)


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """A SIGKILL must reach the ranks; others only the leader, which passes them on itself."""
    try:
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
    except ProcessLookupError:
        return


@contextmanager
def _exclusive(directory: Path) -> Iterator[None]:
    """At most one process works on a run directory, also across jobs on one file system."""
    import fcntl

    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ReproduceError(f"{directory}: another process works on this run") from error
        yield


def prepare_data(
    children: Children, source: DataSource, run: Run, log: Path, environment: Mapping[str, str]
) -> None:
    """prepare_data.py decides itself whether its output is up to date."""
    code = children.start(prepare_command(source, run.config), log, environment)
    if code != 0 and not children.stopping:
        raise ReproduceError(
            f"preparing {source.name} failed with exit code {code}; the last lines of {log}:\n"
            + tail(log)
        )


def tail(path: Path, lines: int = 12) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "(no log)"
    return "\n".join("    " + line for line in text.splitlines()[-lines:])


def execute_run(
    children: Children,
    launcher: Launcher,
    directory: Path,
    run: Run,
    environment: Mapping[str, str],
    *,
    only_steps: Callable[[str], bool] = lambda step: True,
) -> RunState:
    """All unfinished steps in order; the state is on disk at every moment."""
    with _exclusive(directory):
        expected = expected_steps(run)
        commands: dict[str, Callable[[], list[str]]] = {
            "train": partial(train_command, launcher, directory, run)
        }
        for step in run.evaluations:
            commands[step.name] = partial(evaluate_command, launcher, directory, run, step)
        state = read_state(directory)
        for name, value in expected.items():
            if name in done_steps(directory, expected) or not only_steps(name):
                continue
            state = _execute_step(
                children, directory, name, value, commands[name], environment, state
            )
            if state.state != State.RUNNING:
                return state
        finished = done_steps(directory, expected) == set(expected)
        state = RunState(State.DONE if finished else State.PENDING, "", 0, state.seconds)
        write_state(directory, state)
        return state


def _execute_step(
    children: Children,
    directory: Path,
    name: str,
    value: str,
    command: Callable[[], list[str]],
    environment: Mapping[str, str],
    before: RunState,
) -> RunState:
    running = RunState(State.RUNNING, name, None, before.seconds, os.getpid(), socket.gethostname())
    write_state(directory, running)
    start = time.monotonic()
    code = children.start(command(), directory / "logs" / f"{name}.log", environment)
    seconds = time.monotonic() - start
    spent = before.seconds + seconds
    if code == 0:
        mark_done(directory, name, value, seconds)
        return RunState(State.RUNNING, name, 0, spent)
    interrupted = children.stopping or code == EXIT_REQUEUE
    state = RunState(State.INTERRUPTED if interrupted else State.FAILED, name, code, spent)
    write_state(directory, state)
    return state


# The commands of each step, as argument lists: prepare_data.py, train.py, evaluate.py.

REPOSITORY = Path(__file__).resolve().parents[2]
"""Steps are started here, where deepy.py lives and relative paths of configs begin."""


@dataclass(frozen=True)
class Launcher:
    """How a script is started: deepy.py here, or srun inside a Slurm job."""

    srun: bool = False
    container: Sequence[str] = ()
    python: str = sys.executable

    def command(self, script: str, config: Path, run: Run, arguments: Sequence[str]) -> list[str]:
        if kernels := kernels_in(run.config):  # the suite names it; config.yml lies in a run folder
            arguments = [*arguments, "--allow-kernel", *kernels]
        if self.srun:
            # The first rank that has saved must not end the others; a lost rank ends them soon.
            waits = ["--kill-on-bad-exit=0", "--wait=60"]
            start = ["srun", f"--ntasks={run.gpus}", *waits, *self.container]
            return [*start, self.python, "-u", script, str(config), *arguments]
        # Several runs on one machine must not share the port of their process groups.
        port = ["--set", f"master_port={free_port()}"]
        return [self.python, "-u", "deepy.py", script, str(config), *arguments, *port]


def prepare_command(
    source: DataSource, config: Mapping[str, Any], python: str = sys.executable
) -> list[str]:
    """Download or read, tokenize with the runs' own tokenizer, and index one data set."""
    command = [python, "-u", "prepare_data.py", source.source, "-d", source.directory]
    command += ["-t", str(config["tokenizer_type"])]
    for key, flag in (("vocab_file", "--vocab-file"), ("merge_file", "--merge-file")):
        if config.get(key):
            command += [flag, str(config[key])]
    return [*command, *source.arguments]


def train_command(launcher: Launcher, directory: Path, run: Run) -> list[str]:
    return launcher.command("train.py", directory / "config.yml", run, [])


def evaluate_command(launcher: Launcher, directory: Path, run: Run, step: EvalStep) -> list[str]:
    """Results of different lengths of one task must not overwrite each other: own prefixes."""
    arguments = ["--eval_tasks", step.task]
    if step.length is not None:
        prefix = directory / "results" / f"length{step.length}"
        arguments += [
            "--eval_results_prefix",
            str(prefix),
            "--set",
            f"eval_lengths=[{step.length}]",
        ]
        if step.window is not None:
            arguments.append(f"eval_window={step.window}")
    return launcher.command("evaluate.py", directory / "config.yml", run, arguments)
