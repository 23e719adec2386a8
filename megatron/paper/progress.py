"""One line per run: state, step, loss and time left, from the files in its directory."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from megatron.paper.results import read_metrics
from megatron.paper.run_files import (
    State,
    done_steps,
    expected_steps,
    read_state,
    step_seconds,
)
from megatron.paper.suite import Run

__all__ = ["RunProgress", "duration", "progress_of"]

_TAIL_BYTES = 16384


@dataclass(frozen=True)
class RunProgress:
    name: str
    state: str
    stage: str = ""
    step: int = 0
    total: int = 0
    loss: float | None = None
    seconds_left: float | None = None
    seconds_spent: float = 0.0

    def line(self) -> str:
        parts = [f"{self.name:<34}", f"{self.state:<11}"]
        if self.state == State.PENDING and not self.step:
            return " ".join(parts).rstrip()
        if self.stage:
            parts.append(f"{self.stage:<22}")
        if self.total:
            parts.append(f"{self.step:>6}/{self.total}")
        if self.loss is not None:
            parts.append(f"loss {self.loss:.3f}")
        if self.state == State.RUNNING and self.seconds_left is not None:
            parts.append(f"{duration(self.seconds_left)} left")
        return "  ".join(parts)


def duration(seconds: float) -> str:
    whole = max(round(seconds), 0)
    hours, rest = divmod(whole, 3600)
    if hours >= 48:
        return f"{hours / 24:.1f} d"
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def progress_of(directory: Path, run: Run) -> RunProgress:
    state = read_state(directory)
    expected = expected_steps(run)
    done = done_steps(directory, expected)
    total = int(run.config["train_iters"])
    step, loss, pace = _last_metrics(directory / "metrics.jsonl")
    name = state.state
    if done == set(expected):
        name = State.DONE
    elif name == State.DONE:
        name = State.PENDING  # the suite asks for more than was done
    elif name == State.RUNNING and not _alive(state.process, state.host):
        name = State.INTERRUPTED
    stage = state.step if name in (State.RUNNING, State.INTERRUPTED, State.FAILED) else ""
    left = pace * (total - step) if pace is not None and stage == "train" else None
    spent = sum(step_seconds(directory, item) or 0.0 for item in expected)
    return RunProgress(run.name, name, stage, step, total, loss, left, spent)


def _alive(process: int | None, host: str) -> bool:
    """Only a process on this machine can be checked; others are believed."""
    if process is None or host != socket.gethostname():
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _last_metrics(path: Path) -> tuple[int, float | None, float | None]:
    """Step, loss and seconds per step from the end of the file, whatever its size."""
    if not path.is_file():
        return 0, None, None
    step, loss, pace = 0, None, None
    for entry in _tail_entries(path):
        step = max(step, int(entry["step"]))
        loss = entry.get("loss", loss)
        pace = entry.get("step_seconds", pace)
    return step, loss, pace


def _tail_entries(path: Path) -> list[dict[str, float]]:
    if path.stat().st_size <= _TAIL_BYTES:
        return list(read_metrics(path))
    with path.open("rb") as file:
        file.seek(-_TAIL_BYTES, os.SEEK_END)
        lines = file.read().decode("utf-8", errors="replace").splitlines()[1:]
    entries = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "step" in entry:
            entries.append(entry)
    return entries
