"""Files of tools/reproduce.py in a run directory, beside those of train.py and evaluate.py.

runs/<suite>/<run>/
    config.yml            the complete config, the only input of every step
    run.json              which run this is: suite, sections, model, data, method, seed
    state.json            what happened last: running, interrupted, failed or done
    .done/<step>.json     one marker per finished step, with the hash of what it depended on; an
                          evaluation counts as finished only if its results fit the suite, too
    logs/<step>.log       output of each step, appended on every attempt
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron.atomic_files import fingerprint, read_json, write_text
from megatron.errors import ConfigError, ReproduceError
from megatron.neox_arguments.yaml_files import parse_yaml, read_text
from megatron.paper.suite import TRAIN, Run, Step, train_hash_by_name, trained_with


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


def prepare_run(run: Run) -> None:
    """Write the config and the description; refuse to mix two trainings in one directory."""
    if different := training_differences(run):
        raise ReproduceError(
            f"{run.directory} holds a run with another training config ({different}). Move it "
            "aside, or add --restart-changed, which does that (nothing is deleted)."
        )
    finished = trained(run)
    head = f"# Run {run.name}, written by tools/reproduce.py. Edit the suite, not this file.\n"
    body = yaml.safe_dump(dict(run.config), sort_keys=True, default_flow_style=None, width=100)
    write_text(run.directory / "config.yml", head + body, parents=True)
    description = {
        "suite": run.directory.parent.name,
        "run": run.name,
        "sections": list(run.sections),
        "model": run.model,
        "data": run.data,
        "method": run.method,
        "seed": run.seed,
        "train_hash": run.train_hash,
    }
    write_text(run.directory / "run.json", json.dumps(description, indent=1) + "\n")
    marker = _marker(run, TRAIN)
    if finished and marker.get("hash") != run.train_hash:  # of version 0.1; config.yml is new now
        _write_marker(run, TRAIN, {**marker, "hash": run.train_hash})


def training_differences(run: Run) -> str:
    """How the config that a run's directory was trained with differs from the suite's.

    Empty if it does not, or if training has not started.
    """
    files = ("metrics.jsonl", "latest", ".done/train.json")
    started = any((run.directory / name).exists() for name in files)
    recorded = _recorded_hash(run)
    if not started or not recorded or recorded == run.train_hash:
        return ""
    saved = _saved_config(run)
    before, now, missing = trained_with(saved), trained_with(run.config), object()
    if before == now and recorded in (fingerprint(before), train_hash_by_name(saved)):
        return ""  # other keys than those of the training, or another version's hash
    changes = [
        f"{key} {before.get(key, 'unset')} instead of {now.get(key, 'unset')}"
        for key in sorted({*before, *now})
        if before.get(key, missing) != now.get(key, missing)
    ]
    known = ", ".join(changes) if saved else ""
    return "trained with " + (known or "another training config")


def _recorded_hash(run: Run) -> str:
    return str((read_json(run.directory / "run.json") or {}).get("train_hash") or "")


def _saved_config(run: Run) -> dict[str, Any]:
    try:
        saved = parse_yaml(read_text(run.directory / "config.yml"), "config.yml")
    except ConfigError:
        return {}
    return saved if isinstance(saved, dict) else {}


def move_aside(run: Run) -> Path | None:
    """Rename the directory of a run whose training config changed; None if it need not move."""
    if not training_differences(run):
        return None
    old = f"{run.directory.name}.old-{time.strftime('%Y%m%d-%H%M%S')}"
    return run.directory.rename(run.directory.with_name(old))


def read_state(directory: Path) -> RunState:
    """What happened last; a damaged file counts as missing."""
    content = read_json(directory / "state.json") or {}
    process, code = content.get("process"), content.get("exit_code")
    return RunState(
        _word(content.get("state")) or State.PENDING,
        _word(content.get("step", "")),
        code if isinstance(code, int) else None,
        finite(content.get("seconds")) or 0.0,
        process if isinstance(process, int) else None,
        _word(content.get("host", "")),
    )


def _word(value: object) -> str:
    """A name from an untrusted file; it is printed and used in lookups."""
    return value if isinstance(value, str) and re.fullmatch(r"[\w:-][\w.:-]*", value) else ""


def write_state(directory: Path, state: RunState) -> None:
    write_text(directory / "state.json", json.dumps(state.__dict__, indent=1) + "\n", parents=True)


def trained(run: Run) -> bool:
    """Whether training is finished, with the config that the suite has now."""
    found = _marker(run, TRAIN).get("hash")
    if found == run.train_hash:
        return True
    return bool(found) and found == _recorded_hash(run) and not training_differences(run)


def mark_done(run: Run, step: Step, seconds: float) -> None:
    """Note that a step ended well: what it depended on, and how long it took."""
    content = {"hash": run.step_hash(step), "seconds": round(seconds, 1), "time": int(time.time())}
    _write_marker(run, step, content)


def _write_marker(run: Run, step: Step, content: Mapping[str, Any]) -> None:
    write_text(_marker_path(run, step), json.dumps(content) + "\n", parents=True)


def step_seconds(run: Run, step: Step) -> float | None:
    return finite(_marker(run, step).get("seconds"))


def _marker(run: Run, step: Step) -> dict[str, Any]:
    return read_json(_marker_path(run, step)) or {}


def _marker_path(run: Run, step: Step) -> Path:
    return run.directory / ".done" / f"{step.name}.json"


def log_path(run: Run, step: str) -> Path:
    return run.directory / "logs" / f"{step}.log"


def record_command(suite_directory: Path, command: str, seconds: float, exit_code: int) -> None:
    """Append to the suite's history, from which the report quotes command and wall-clock time."""
    suite_directory.mkdir(parents=True, exist_ok=True)
    entry = {"command": command, "seconds": round(seconds, 1), "exit_code": exit_code}
    entry["ended"] = int(time.time())
    with (suite_directory / "history.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def read_history(suite_directory: Path) -> list[dict[str, Any]]:
    try:
        text = (suite_directory / "history.jsonl").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return list(json_lines(text.splitlines()))


# Numbers from untrusted files.


def finite(value: object) -> float | None:
    """A finite number from an untrusted file, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer that no float can hold
        return None


def read_metrics(path: Path, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl, or of its end, with a usable step; broken ones are left out."""
    try:
        with path.open("rb") as file:
            if last_bytes is not None and path.stat().st_size > last_bytes:
                file.seek(-last_bytes, os.SEEK_END)
                file.readline()
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return
    for entry in json_lines(lines):
        step = finite(entry.get("step"))
        if step is not None:
            yield {**entry, "step": int(step)}


def json_lines(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file; lines that are none are left out."""
    for line in lines:
        entry = None
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(line)
        if isinstance(entry, dict):
            yield entry


def kernel_values(content: Mapping[str, Any]) -> dict[str, list[float]]:
    """The parameters in a line of metrics; none if one of them lacks a number for a head."""
    values = {}
    for name, entries in content.items():
        numbers = [finite(entry) for entry in entries] if isinstance(entries, list) else [None]
        values[str(name)] = [number for number in numbers if number is not None]
        if len(values[str(name)]) < len(numbers):  # diverged: half a kernel is no kernel
            return {}
    return values


def same_heads(values: Mapping[str, Sequence[float]], first: Mapping[str, Sequence[float]]) -> bool:
    """Whether there are the parameters of the first record, for as many heads each."""
    heads = {len(numbers) for kernel in (values, first) for numbers in kernel.values()}
    return values.keys() == first.keys() and len(heads) == 1 and 0 not in heads
