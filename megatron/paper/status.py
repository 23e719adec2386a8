"""`tools/reproduce.py status`: each run's state, step, loss, time left and place in Slurm."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from megatron.evaluation.text_tables import text_table
from megatron.machine import is_running
from megatron.paper.execute import data_log, tail
from megatron.paper.result_fit import Fit, StepCheck, check_steps, done_steps, is_finished
from megatron.paper.run_files import (
    State,
    finite,
    log_path,
    read_metrics,
    read_state,
    step_seconds,
    training_differences,
)
from megatron.paper.slurm import submitted_jobs
from megatron.paper.suite import TRAIN, Run, Suite
from megatron.terminal import shown_command

_TAIL_BYTES = 16384


@dataclass(frozen=True)
class RunProgress:
    run: Run
    state: str
    checks: Mapping[str, StepCheck]
    """Of its evaluations."""
    stage: str = ""
    step: int = 0
    total: int = 0
    loss: float | None = None
    seconds_left: float | None = None

    def cells(self) -> list[str]:
        """Name, state, stage, step, loss and time left."""
        loss = f"{self.loss:.3f}" if self.loss is not None else ""
        running = self.state == State.RUNNING and self.seconds_left is not None
        left = duration(self.seconds_left or 0) if running else ""
        step = f"{self.step}/{self.total}" if self.step else ""
        return [self.run.name, self.state, self.stage, step, loss, left]

    def line(self) -> str:
        """The same on one line."""
        name, state, stage, step, loss, left = self.cells()
        parts = [f"{name:<34}", f"{state:<11}", stage, step, loss and f"loss {loss}"]
        return "  ".join(part for part in [*parts, left and f"{left} left"] if part).rstrip()


def duration(seconds: float) -> str:
    whole = max(round(seconds), 0)
    hours, rest = divmod(whole, 3600)
    if hours >= 48:
        return f"{hours / 24:.1f} d"
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def progress_of(run: Run) -> RunProgress:
    """From the files in the run's directory."""
    state = read_state(run.directory)
    total = int(run.config["train_iters"])
    step, loss, pace = _last_metrics(run.directory / "metrics.jsonl")
    checks = check_steps(run)
    name = state.state
    if is_finished(run, checks):
        name = State.DONE
    elif name == State.DONE:
        name = State.PENDING  # the suite asks for more than was done
    elif name == State.RUNNING and not _alive(state.process, state.host):
        name = State.INTERRUPTED
    stage = state.step if name in (State.RUNNING, State.INTERRUPTED, State.FAILED) else ""
    left = pace * (total - step) if pace is not None and stage == "train" else None
    return RunProgress(run, name, checks, stage, step, total, loss, left)


def _alive(process: int | None, host: str) -> bool:
    """Only a process on this machine can be checked; others count as running."""
    return process is None or host != socket.gethostname() or is_running(process)


def _last_metrics(path: Path) -> tuple[int, float | None, float | None]:
    """Step, loss and seconds per step from the end of the file, whatever its size."""
    step, loss, pace = 0, None, None
    for entry in read_metrics(path, _TAIL_BYTES):
        step = max(step, entry["step"])
        loss = finite(entry.get("loss")) or loss
        pace = finite(entry.get("step_seconds")) or pace
    return step, loss, pace


def status_text(suite: Suite) -> str:
    """From the run directories, and squeue where there is one."""
    queued = queue_states(suite)
    found = [progress_of(run) for run in suite.runs]
    rows = [[*progress.cells(), queued.get(progress.run.name, "")] for progress in found]
    states = Counter(progress.state for progress in found)
    notes = []
    for progress in found:
        notes += _unfit(progress, suite.flags)
        if progress.state == State.FAILED:
            last = tail(log_path(progress.run, progress.stage), 30).split("\n")
            reason = next((line.strip() for line in reversed(last) if line.strip()), "no log")
            notes.append(f"  {progress.run.name} failed: {reason[:160]}")
    head = ["run", "state", "stage", "step", "loss", "left", "queue"]
    align = ["left", "left", "left", "right", "right", "right", "left"]
    summary = ", ".join(f"{count} {state}" for state, count in states.most_common())
    lines = [text_table(head, rows, align), "", f"{len(rows)} runs: {summary}{_work_left(found)}"]
    if notes:
        lines += ["", *notes]
    if states[State.FAILED]:
        lines.append(f"  logs: {shown_command('reproduce')} logs {suite.flags}")
    return "\n".join(lines) + "\n"


def _work_left(found: Iterable[RunProgress]) -> str:
    """Run time that is left, judged by the steps that are finished."""
    taken: dict[str, list[float]] = {}
    missing, running = Counter[str](), 0.0
    for progress in found:
        run, done = progress.run, done_steps(progress.run, progress.checks)
        for step in run.steps:
            kind, seconds = f"{run.model} {step.name}", step_seconds(run, step)
            if step.name in done:
                taken.setdefault(kind, []).extend([seconds] if seconds else [])
            elif step == TRAIN and progress.seconds_left is not None:
                running += progress.seconds_left
            else:
                missing[kind] += 1
    if not (missing or running) or not all(taken.get(kind) for kind in missing):
        return ""
    left = running + sum(count * fmean(taken[kind]) for kind, count in missing.items())
    return f"; about {duration(left)} of work left, one run at a time"


def logs_text(suite: Suite, name: str | None, lines: int) -> str:
    """The end of the logs of one run or data set, or of every run that failed."""
    if name is None:
        failed = [run.name for run in suite.runs if progress_of(run).state == State.FAILED]
        return "\n".join(logs_text(suite, run, lines) for run in failed) or "nothing failed\n"
    if name in suite.file.data:
        paths = [data_log(suite, name)]
    else:
        directory = suite.run_named(name).directory
        step = read_state(directory).step
        paths = sorted((directory / "logs").glob(f"{step or '*'}.log"))
    # What Slurm itself wrote: a job that died before our first line left its reason there.
    for job, (_, tasks) in submitted_jobs(suite.directory).items():
        if name in tasks:
            paths.append(suite.directory / "slurm" / "logs" / f"{job}-{tasks.index(name)}.log")
    shown = [f"==> {path}\n{tail(path, lines)}\n" for path in paths if path.is_file()]
    return "\n".join(shown) or f"{name}: no log yet under {suite.directory}\n"


def _unfit(progress: RunProgress, flags: str) -> list[str]:
    name = progress.run.name
    if different := training_differences(progress.run):
        again = f"run {flags} --restart-changed"
        return [f"  {name} was {different}; `{again}` moves it aside and trains it again"]
    return [
        f"  {name} {step} will be evaluated again: {check.fit.value}: {check.detail}"
        for step, check in progress.checks.items()
        if check.fit in (Fit.OUTDATED, Fit.FOREIGN)
    ]


def queue_states(suite: Suite) -> dict[str, str]:
    """Run name -> "train PENDING (Priority)" from squeue; empty without Slurm or jobs."""
    submission = submitted_jobs(suite.directory)
    if not submission or shutil.which("squeue") is None:
        return {}
    jobs = ",".join(job for job, _ in submission.values())
    fields = "ArrayJobID:20,ArrayTaskID:20,State:20,RestartCnt:12,Reason:60"
    command = ["squeue", "--noheader", "--array", f"--Format={fields}", f"--jobs={jobs}"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    states: dict[str, str] = {}
    by_job = {job: (stage, names) for stage, (job, names) in submission.items()}
    for line in listed.stdout.splitlines():
        words = line.split(maxsplit=4)
        if len(words) < 4 or words[0] not in by_job or not words[1].isdigit():
            continue
        stage, names = by_job[words[0]]
        if int(words[1]) >= len(names):
            continue
        reason = f" ({words[4].strip()})" if len(words) > 4 and words[4].strip() != "None" else ""
        requeued = f", requeued {words[3]}x" if words[3] not in ("0", "N/A") else ""
        name = names[int(words[1])]
        # A run waits in two arrays at once: training is the more interesting one.
        if name not in states or stage.startswith("train"):
            states[name] = f"{stage} {words[2]}{reason}{requeued}"
    return states
