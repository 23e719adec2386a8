"""What tools/reproduce.py keeps in a run directory, beside what train.py and evaluate.py write.

runs/<suite>/<run>/
    config.yml            the complete config, the only input of every step
    run.json              which run this is: suite, sections, model, data, method, seed
    state.json            what happened last: running, interrupted, failed or done
    .done/<step>.json     one marker per finished step, with the hash of what it depended on; an
                          evaluation counts as finished only if its results fit the suite, too
    logs/<step>.log       output of each step, appended on every attempt
"""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megatron.atomic_files import read_json, write_text
from megatron.errors import ReproduceError
from megatron.paper.result_fit import Fit, check_steps, training_differences
from megatron.paper.run_results import finite, json_lines
from megatron.paper.suite import TRAIN, Run, Step, Suite


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
            "aside, or let `tools/reproduce.py run --restart-changed` do that (nothing is deleted)."
        )
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


def move_aside(run: Run) -> Path | None:
    """Rename the directory of a run whose training config changed; None if it need not move."""
    if not training_differences(run):
        return None
    old = f"{run.directory.name}.old-{time.strftime('%Y%m%d-%H%M%S')}"
    return run.directory.rename(run.directory.with_name(old))


def read_state(directory: Path) -> RunState:
    """What happened last; a damaged file is as good as none."""
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
    """A name from a file that anything may have been written to; it is printed and looked for."""
    return value if isinstance(value, str) and re.fullmatch(r"[\w:-][\w.:-]*", value) else ""


def write_state(directory: Path, state: RunState) -> None:
    write_text(directory / "state.json", json.dumps(state.__dict__, indent=1) + "\n", parents=True)


def trained(run: Run) -> bool:
    """Whether training is finished, with the config that the suite has now."""
    return _marker(run, TRAIN).get("hash") == run.train_hash


def done_steps(run: Run) -> set[str]:
    """Names of finished steps: training by its marker, an evaluation by results of use here."""
    if not trained(run):
        return set()
    checks = check_steps(run)
    return {TRAIN.name, *(name for name, check in checks.items() if check.fit is Fit.COMPLETE)}


def is_finished(run: Run) -> bool:
    return done_steps(run) == {step.name for step in run.steps}


def mark_done(run: Run, step: Step, seconds: float) -> None:
    """Note that a step ended well: what it depended on, and how long it took."""
    content = {"hash": run.step_hash(step), "seconds": round(seconds, 1), "time": int(time.time())}
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


# Keep what finished runs have to show, small enough for a repository: no checkpoints, no caches.
#
# A folder of runs that was copied back counts as finished, so that another machine goes on where
# this one stopped::
#
#     tools/reproduce.py keep --suite study --out docs/results/study/runs
#     cp -r docs/results/study/runs/study runs/          # elsewhere, then `run` as usual

_FILES = ("config.yml", "run.json", "metrics.jsonl")


def keep_results(suite: Suite, target: Path) -> list[str]:
    """Copy the finished runs of a suite to ``target/SUITE``; their names."""
    kept = [run for run in suite.runs if is_finished(run)]
    for run in kept:
        source, copy = run.directory, target / suite.name / run.name
        copy.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            shutil.copyfile(source / name, copy / name)
        shutil.copytree(source / ".done", copy / ".done", dirs_exist_ok=True)
        # Whose process it was and on which machine is nobody's business.
        write_state(copy, replace(read_state(source), process=None, host=""))
        for file in sorted((source / "results").glob("*.json")):
            content = read_json(file)
            if content is None:
                raise ReproduceError(f"{file}: not a result file; delete it or evaluate again")
            compact = json.dumps(content, separators=(",", ":")) + "\n"
            write_text(copy / "results" / file.name, compact, parents=True)
    return [run.name for run in kept]
