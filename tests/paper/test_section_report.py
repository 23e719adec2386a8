"""A section shows what its tasks ask for, a user's own task included: that task is one class."""

from __future__ import annotations

import ast
import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from megatron.errors import ReproduceError
from megatron.evaluation.task_registry import find_task, own_tasks
from megatron.evaluation.tasks import (
    Context,
    EvaluationOptions,
    EvaluationTask,
    GroupView,
    Place,
    View,
    requested,
)
from megatron.neox_arguments import NeoXArgs, allowed_code
from megatron.paper.execute import Launcher, step_command
from megatron.paper.report import make_report
from megatron.paper.result_fit import Fit, check_steps, done_steps
from megatron.paper.suite import Run, Step, load_suite
from megatron.paper.suite_file import SUITE_DIRECTORY
from tests.paper.synthetic import result_file, write_run

NAME = f"{__name__}:Echo"


class Echo(EvaluationTask):
    """All that a task of one's own needs to be run, checked, tabulated and drawn."""

    views: ClassVar[tuple[View, ...]] = (
        GroupView("echo", "Echo", "The figure.", {"all": "All texts"}, "echoes", "Echoes heard."),
    )

    def parameters(self, options: EvaluationOptions) -> dict[str, Any]:
        return {"lengths": options.eval_lengths, "seed": options.data_seed}

    def run(self, context: Context) -> dict[str, Any]:
        return {"grid": [[length, 1.0] for length in context.options.eval_lengths]}

    def table(self, results: dict[str, Any]) -> str:
        return str(results["grid"])

    def cells(self, results: dict[str, Any]) -> Mapping[Place, float]:
        return {("all", length): value for length, value in results["grid"]}

    def wanted(self, options: EvaluationOptions, splits: Sequence[str]) -> list[Place]:
        return [("all", length) for length in options.eval_lengths]


def own_suite(tmp_path: Path) -> Path:
    """The smoke suite with the task beside perplexity."""
    text = (SUITE_DIRECTORY / "smoke.yml").read_text(encoding="utf-8")
    path = tmp_path / "own.yml"
    path.write_text(
        text.replace("    lengths:", f"    tasks: [extrapolation, '{NAME}']\n    lengths:")
    )
    return path


def write_echo(run: Run, scale: float) -> Path:
    """A result with the settings that evaluate.py records."""
    args = NeoXArgs.from_dict(dict(run.config))
    options, own = EvaluationOptions.from_args(args), find_task(NAME)
    results = {"grid": [[length, scale * length] for length in options.eval_lengths]}
    content = result_file(run, Step(NAME), results)
    content |= requested(own, options, args.model.model_dump(mode="json"))
    path = run.directory / "results" / f"step20_{own.file_name(options)}.json"
    path.write_text(json.dumps(content))
    return path


def test_a_new_task_is_one_class_and_appears_in_the_report(tmp_path: Path) -> None:
    path = own_suite(tmp_path)
    allowed_code.allow_kernel(NAME)
    suite = load_suite(str(path), ["main", "*.1235"], runs_root=tmp_path)
    for number, run in enumerate(suite.runs, 1):
        known = tuple(step for step in run.evaluations if step.task != NAME)
        assert len(known) < len(run.evaluations)
        write_run(replace(run, evaluations=known))
        assert NAME not in done_steps(run)
        write_echo(run, float(number))
        assert NAME in done_steps(run)
    files = make_report(suite)
    with (files.directory / "tables" / "main_echo.csv").open(encoding="utf-8") as file:
        rows = {(row["column"], row["row"]): float(row["mean"]) for row in csv.DictReader(file)}
    assert rows == {
        ("KERPLE-log", "32"): 32,
        ("KERPLE-log", "64"): 64,
        ("ALiBi", "32"): 64,
        ("ALiBi", "64"): 128,
    }
    text = files.markdown.read_text(encoding="utf-8")
    assert "**main_echo.** Echoes heard." in text and "figures/main_echo.png" in text
    assert (files.directory / "figures" / "main_echo.png").stat().st_size > 1000
    command = step_command(Launcher(), suite.runs[0], Step(NAME))
    assert command[command.index("--eval_tasks") + 1] == NAME


def test_other_parameters_of_the_task_are_foreign(tmp_path: Path) -> None:
    path = own_suite(tmp_path)
    allowed_code.allow_kernel(NAME)
    (run,) = load_suite(str(path), ["main", "alibi", "*.1235"], runs_root=tmp_path).runs
    write_run(replace(run, evaluations=()))
    result = write_echo(run, 1.0)
    content = json.loads(result.read_text())
    content["settings"]["seed"] = 99
    result.write_text(json.dumps(content))
    check = check_steps(run)[NAME]
    assert (check.fit, "seed 99 instead of 1235" in check.detail) == (Fit.FOREIGN, True)


def test_a_suite_may_not_import_a_class_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allowed_code, "_allowed", set())
    path = own_suite(tmp_path)
    with pytest.raises(ReproduceError, match=f"add --allow-kernel {NAME}"):
        load_suite(str(path))
    path.write_text(path.read_text().replace(f"'{NAME}'", "extrapolating"))
    with pytest.raises(ReproduceError, match=r"'extrapolating' is unknown .have extrapolation"):
        load_suite(str(path))


def test_the_package_knows_no_task_by_name() -> None:
    """Only the format of a suite file names two: the default of `tasks`, and `positionwise`."""
    named = set()
    for path in SUITE_DIRECTORY.parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and node.value in own_tasks():
                named.add((path.name, node.value))
    assert named == {("suite_file.py", "extrapolation"), ("suite_file.py", "positionwise")}
