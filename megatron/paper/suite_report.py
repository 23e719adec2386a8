"""From a suite and its run directories to the report."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatron.paper.figures import PositionCurve
from megatron.paper.report import (
    PositionPanel,
    ReportFiles,
    ReportSection,
    ReportSpec,
    write_report,
)
from megatron.paper.results import ResultSet, RunKey, read_run
from megatron.paper.run_files import done_steps, expected_steps, read_history, step_seconds
from megatron.paper.suite import Run, Section, Suite

__all__ = ["collect_results", "machine_name", "make_report"]


def collect_results(suite: Suite, root: Path) -> ResultSet:
    """What all runs have so far."""
    return ResultSet(
        tuple(
            read_run(
                suite.run_directory(root, run),
                RunKey(run.model, run.data, run.method, run.seed, run.train_length),
            )
            for run in suite.runs
        )
    )


def make_report(
    suite: Suite, root: Path, directory: Path | None = None, command: str = ""
) -> ReportFiles:
    """Write the report of whatever is finished; unfinished runs are listed as missing."""
    results = collect_results(suite, root)
    missing = [run.name for run in suite.runs if not _finished(suite, root, run)]
    spec = ReportSpec(
        title=f"KERPLE: the {suite.name} suite",
        lead=suite.about + ".",
        splits=suite.splits,
        sections=tuple(_section(suite, section) for section in suite.sections),
        facts=_facts(suite, root, len(missing), command),
        missing=missing,
        machine=machine_name(),
    )
    return write_report(spec, results, directory or root / suite.name / "report")


def _finished(suite: Suite, root: Path, run: Run) -> bool:
    expected = expected_steps(run)
    return done_steps(suite.run_directory(root, run), expected) == set(expected)


def _section(suite: Suite, section: Section) -> ReportSection:
    runs = [run for run in suite.runs if section.name in run.sections]
    heads = int(runs[0].config["num_attention_heads"]) if runs else 1
    return ReportSection(
        section.name,
        section.title,
        section.models,
        section.methods,
        section.data,
        heads,
        section.table,
        section.speed_caption,
        section.speed_data,
        tuple(_position_panels(section)),
    )


def _position_panels(section: Section) -> Iterable[PositionPanel]:
    """Entries with the same data and length share a panel; windowed lines come last."""
    panels: dict[tuple[str, int], list[PositionCurve]] = {}
    for item in sorted(section.positionwise, key=lambda entry: entry.window or 0):
        curves = panels.setdefault((item.data, item.length), [])
        curves += [PositionCurve(name, item.window) for name in item.methods]
    for (data, length), curves in panels.items():
        yield PositionPanel(data, length, tuple(curves))


def _facts(suite: Suite, root: Path, missing: int, command: str) -> list[tuple[str, str]]:
    total = len(suite.runs)
    seeds = sorted({run.seed for run in suite.runs})
    facts = [
        ("Runs", f"{total - missing} of {total} finished; seeds {', '.join(map(str, seeds))}"),
        ("Machine", machine_name()),
        ("Software", _software()),
    ]
    spent = _time_spent(suite, root)
    if spent:
        facts.append(("Time", spent))
    history = read_history(root / suite.name)
    if history:
        wall = sum(float(entry.get("seconds", 0)) for entry in history)
        facts.append(("Wall clock", f"{_hours(wall)} in {len(history)} call(s) of `run`"))
        command = str(history[-1].get("command", command))
    if command:
        facts.insert(0, ("Command", command))
    return facts


def _time_spent(suite: Suite, root: Path) -> str:
    train = evaluate = 0.0
    for run in suite.runs:
        directory = suite.run_directory(root, run)
        train += step_seconds(directory, "train") or 0.0
        evaluate += sum(step_seconds(directory, step.name) or 0.0 for step in run.evaluations)
    if not train:
        return ""
    return f"{_hours(train)} training and {_hours(evaluate)} evaluating, summed over runs"


def _hours(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def machine_name() -> str:
    """Processor, cores and GPUs; no host name, reports are published."""
    cores = f"{os.cpu_count() or 1} cores of {_processor()}"
    if shutil.which("nvidia-smi") is None:
        return f"{cores}, no GPU"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, check=False)
    names = [line.strip() for line in listed.stdout.splitlines() if line.strip()]
    return f"{len(names)} x {names[0]}, {cores}" if names else f"{cores}, no GPU"


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    for line in text.splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _software() -> str:
    parts = [f"Python {platform.python_version()}"]
    for package in ("torch", "deepspeed", "scipy"):
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(parts)
