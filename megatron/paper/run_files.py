"""What tools/reproduce.py keeps in a run directory, beside what train.py and evaluate.py write.

runs/<suite>/<run>/
    config.yml            the complete config, the only input of every step
    run.json              which run this is: suite, sections, model, data, method, seed
    state.json            what happened last: running, interrupted, failed or done
    .done/<step>.json     one marker per finished step, with the hash of what it depended on
    logs/<step>.log       output of each step, appended on every attempt
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron.atomic_files import write_text
from megatron.errors import ReproduceError
from megatron.paper.suite import Run

__all__ = [
    "RunState",
    "State",
    "done_steps",
    "mark_done",
    "prepare_run",
    "read_state",
    "write_state",
]


class State:
    """Values of `state` in state.json."""

    PENDING = "pending"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    DONE = "done"


@dataclass(frozen=True)
class RunState:
    state: str = State.PENDING
    step: str = ""
    exit_code: int | None = None
    seconds: float = 0.0
    """Wall-clock time spent on this run over all attempts."""
    process: int | None = None
    host: str = ""


def write_atomically(path: Path, text: str) -> None:
    """In a folder that may not exist yet."""
    write_text(path, text, parents=True)


def config_text(run: Run) -> str:
    head = f"# Run {run.name}, written by tools/reproduce.py. Edit the suite, not this file.\n"
    body = yaml.safe_dump(dict(run.config), sort_keys=True, default_flow_style=None, width=100)
    return head + body


def prepare_run(directory: Path, suite_name: str, run: Run) -> None:
    """Write the config and the description; refuse to mix two trainings in one directory."""
    trained_with = _recorded_train_hash(directory)
    if trained_with is not None and trained_with != run.train_hash:
        raise ReproduceError(
            f"{directory} holds a run with another training config. Move it aside, or let "
            "`tools/reproduce.py run --restart-changed` do that (nothing is deleted)."
        )
    write_atomically(directory / "config.yml", config_text(run))
    description = {
        "suite": suite_name,
        "run": run.name,
        "sections": list(run.sections),
        "model": run.model,
        "data": run.data,
        "method": run.method,
        "seed": run.seed,
        "train_hash": run.train_hash,
    }
    write_atomically(directory / "run.json", json.dumps(description, indent=1) + "\n")


def _recorded_train_hash(directory: Path) -> str | None:
    """Hash of the config that training started with, or None if it has not started."""
    started = (directory / "metrics.jsonl").exists() or (directory / "latest").exists()
    if not (started or (directory / ".done" / "train.json").exists()):
        return None
    content = _read_json(directory / "run.json")
    value = content.get("train_hash")
    return str(value) if value else None


def move_aside(directory: Path, run: Run) -> Path | None:
    """Rename the directory of a run whose training config changed; None if it need not move."""
    trained_with = _recorded_train_hash(directory)
    if trained_with is None or trained_with == run.train_hash:
        return None
    target = directory.with_name(f"{directory.name}.old-{time.strftime('%Y%m%d-%H%M%S')}")
    directory.rename(target)
    return target


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_state(directory: Path) -> RunState:
    content = _read_json(directory / "state.json")
    known = {key: content[key] for key in RunState.__dataclass_fields__ if key in content}
    return RunState(**known)


def write_state(directory: Path, state: RunState) -> None:
    write_atomically(directory / "state.json", json.dumps(state.__dict__, indent=1) + "\n")


def expected_steps(run: Run) -> dict[str, str]:
    """Every step of a run with the hash that its marker must carry, in order."""
    steps = {"train": run.train_hash}
    steps |= {step.name: run.step_hash(step) for step in run.evaluations}
    return steps


def done_steps(directory: Path, expected: Mapping[str, str]) -> set[str]:
    """Steps whose marker matches what the suite asks for now."""
    return {
        name
        for name, value in expected.items()
        if _read_json(directory / ".done" / f"{name}.json").get("hash") == value
    }


def mark_done(directory: Path, step: str, value: str, seconds: float) -> None:
    content = {"hash": value, "seconds": round(seconds, 1), "time": int(time.time())}
    write_atomically(directory / ".done" / f"{step}.json", json.dumps(content) + "\n")


def step_seconds(directory: Path, step: str) -> float | None:
    value = _read_json(directory / ".done" / f"{step}.json").get("seconds")
    return float(value) if value is not None else None


def record_command(suite_directory: Path, command: str, seconds: float, exit_code: int) -> None:
    """Append to the suite's history, from which the report quotes command and wall-clock time."""
    suite_directory.mkdir(parents=True, exist_ok=True)
    entry = {"command": command, "seconds": round(seconds, 1), "exit_code": exit_code}
    entry["ended"] = int(time.time())
    with (suite_directory / "history.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def read_history(suite_directory: Path) -> list[dict[str, Any]]:
    try:
        lines = (suite_directory / "history.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    entries = []
    for line in lines:
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries
