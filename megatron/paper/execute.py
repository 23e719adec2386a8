"""Run the steps of one run in child processes, which can be interrupted and resumed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from megatron.errors import ReproduceError
from megatron.launcher.environment import free_port
from megatron.neox_arguments.allowed_code import classes_in
from megatron.paper.result_fit import done_steps, is_finished
from megatron.paper.run_files import (
    RunState,
    State,
    log_path,
    mark_done,
    read_state,
    trained,
    write_state,
)
from megatron.paper.suite import TRAIN, Run, Step, Suite
from megatron.paper.suite_file import DataSet
from megatron.terminal import EXIT_REQUEUE, PACKAGE


@dataclass
class Children:
    """The child processes of this process, for passing signals on."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to our own."""
    processes: set[subprocess.Popen[bytes]] = field(default_factory=set)
    stopping: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, command: Sequence[str], log: Path) -> int:
        """A command to its end, with its output in a log file; the exit code."""
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
                    env={**os.environ, **self.environment},
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
                if process.poll() is not None:
                    continue
                with suppress(ProcessLookupError):
                    # SIGKILL must reach the ranks; others the leader, which passes them on itself.
                    if number == signal.SIGKILL:
                        os.killpg(process.pid, number)
                    else:
                        process.send_signal(number)


def prepare_data(children: Children, launcher: Launcher, suite: Suite, run: Run) -> None:
    """A run's data, with its tokenizer; prepare_data.py decides itself what is up to date."""
    source, log = suite.file.data[run.data], data_log(suite, run.data)
    command = prepare_command(source, suite.data_root, run.config, launcher.python)
    code = children.run([*launcher.container, *command], log)
    if code != 0 and not children.stopping:
        raise ReproduceError(
            f"preparing {source.name} failed with exit code {code}; the last lines of {log}:\n"
            + tail(log)
        )


def data_log(suite: Suite, name: str) -> Path:
    return suite.directory / "logs" / f"prepare-{name}.log"


def tail(path: Path, lines: int = 12) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "(no log)"
    return "\n".join("    " + line for line in text.splitlines()[-lines:])


def execute_run(
    children: Children,
    launcher: Launcher,
    run: Run,
    only_steps: Callable[[Step], bool] = lambda step: True,
) -> RunState:
    """All unfinished steps in order; the state is on disk at every moment."""
    run.directory.mkdir(parents=True, exist_ok=True)
    try:
        # At most one of us works on a run, also across jobs on one file system. train.py has its
        # own lock on the same directory.
        state = read_state(run.directory)
        with FileLock(run.directory / ".reproduce.lock", timeout=_patience(state)):
            state = read_state(run.directory)
            for step in filter(only_steps, run.steps):
                if step.name in done_steps(run):
                    continue
                command = step_command(launcher, run, step)
                state = _execute_step(children, run, step, command, state.seconds)
                if state.state != State.RUNNING:
                    return state
            end = State.DONE if is_finished(run) else State.PENDING
            state = RunState(end, "", 0, state.seconds)
            write_state(run.directory, state)
            return state
    except Timeout as error:
        raise ReproduceError(f"{run.directory}: another process works on this run") from error


def _patience(state: RunState) -> float:
    """How long to wait for the lock: a server may keep it for a host that is gone."""
    from megatron.checkpoints.run_lock import WAIT_SECONDS  # its package imports torch

    elsewhere = state.state == State.RUNNING and state.host not in ("", socket.gethostname())
    return WAIT_SECONDS if elsewhere else 0


def _execute_step(
    children: Children, run: Run, step: Step, command: Sequence[str], spent: float
) -> RunState:
    """`spent` seconds went into the run before; the state is left as running if all went well."""
    here = (os.getpid(), socket.gethostname())
    write_state(run.directory, RunState(State.RUNNING, step.name, None, spent, *here))
    start = time.monotonic()
    code = children.run(command, log_path(run, step.name))
    seconds = time.monotonic() - start
    if code == 0:
        mark_done(run, step, seconds)
        return RunState(State.RUNNING, step.name, 0, spent + seconds)
    interrupted = children.stopping or code == EXIT_REQUEUE
    end = State.INTERRUPTED if interrupted else State.FAILED
    state = RunState(end, step.name, code, spent + seconds)
    write_state(run.directory, state)
    return state


# The commands of each step, as argument lists: prepare_data.py, train.py, evaluate.py.


def script_command(python: str, name: str) -> list[str]:
    """Start deepy, train, evaluate or prepare_data: the script of a checkout, or the package's.

    A script in the working directory keeps its short name: commands can be repeated by hand.
    """
    for folder in (Path.cwd(), PACKAGE.parent):
        script = folder / f"{name}.py"
        if script.is_file() and (folder / "deepy.py").is_file():
            return [python, "-u", script.name if folder == Path.cwd() else str(script)]
    return [python, "-u", "-m", "megatron.commands", name]


@dataclass(frozen=True)
class Launcher:
    """How a script is started: deepy.py here, or srun inside a Slurm job."""

    srun: bool = False
    container: Sequence[str] = ()
    python: str = sys.executable
    one_gpu_per_task: bool = False

    def command(self, script: str, config: Path, run: Run, arguments: Sequence[str]) -> list[str]:
        if kernels := classes_in(run.config):  # the suite names it; config.yml lies in a run folder
            arguments = [*arguments, "--allow-kernel", *kernels]
        if self.srun:
            # The first rank that has saved must not end the others; a lost rank ends them soon.
            waits = ["--kill-on-bad-exit=0", "--wait=60"]
            start = ["srun", f"--ntasks={run.gpus}", *waits, *self._resources(), *self.container]
            return [*start, *script_command(self.python, script), str(config), *arguments]
        # Several runs on one machine must not share the port of their process groups.
        port = ["--set", f"master_port={free_port()}"]
        start = [*script_command(self.python, "deepy"), f"{script}.py"]
        return [*start, str(config), *arguments, *port]

    def _resources(self) -> list[str]:
        """srun of Slurm 22.05 and later does not inherit the job's processors per task."""
        cpus = os.environ.get("SLURM_CPUS_PER_TASK")
        options = [f"--cpus-per-task={cpus}"] if cpus else []
        return [*options, "--gpus-per-task=1"] if self.one_gpu_per_task else options


def prepare_command(
    source: DataSet, data_root: Path, config: Mapping[str, Any], python: str = sys.executable
) -> list[str]:
    """Download or read, tokenize with the runs' own tokenizer, and index one data set."""
    command = [*script_command(python, "prepare_data"), source.source or source.name]
    command += ["-d", str(data_root)]
    command += ["-t", str(config["tokenizer_type"])]
    for key, flag in (("vocab_file", "--vocab-file"), ("merge_file", "--merge-file")):
        if config.get(key):
            command += [flag, str(config[key])]
    return [*command, *source.prepare]


def step_command(launcher: Launcher, run: Run, step: Step) -> list[str]:
    """Results of different lengths of one task must not overwrite each other: own prefixes."""
    config = run.directory / "config.yml"
    if step == TRAIN and run.base is not None:
        if not trained(run.base):
            raise ReproduceError(f"{run.name} begins with {run.base.name}, which is not trained")
        load = f"load={json.dumps(run.base.directory.as_posix())}"
        return launcher.command("train", config, run, ["--set", load])
    if step == TRAIN:
        return launcher.command("train", config, run, [])
    arguments = ["--eval_tasks", step.task]
    if sets := [f"{key}={json.dumps(value)}" for key, value in step.overrides.items()]:
        prefix = step.variant or f"length{step.length}"
        arguments += ["--eval_results_prefix", str(run.directory / "results" / prefix)]
        arguments += ["--set", *sets]
    return launcher.command("evaluate", config, run, arguments)
