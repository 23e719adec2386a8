"""Which result files have the suite's settings; the others are named and left out of tables.

A file counts if it was made with the suite's settings from the run's last checkpoint; otherwise it
is outdated (of another checkpoint or other data) or foreign (made with other settings).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.errors import EvaluationError
from megatron.evaluation.results_schema import (
    Content,
    Result,
    not_a_result,
    read_result,
    weights_id,
)
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.catalogue import canonical_method
from megatron.paper.run_files import finite, trained, training_differences
from megatron.paper.suite import TRAIN, Run, Step

if TYPE_CHECKING:
    from megatron.evaluation.tasks import EvaluationTask, Place

_HEADER = ("seed", "pos_emb", "train_length")
"""Facts beside the settings, in files of every format."""


class Fit(str, Enum):
    """How a step's results on disk relate to what the suite asks for."""

    COMPLETE = "complete"
    MISSING = "missing"
    OUTDATED = "outdated"
    FOREIGN = "foreign"


@dataclass(frozen=True)
class ResultFile:
    path: Path
    result: Result
    cells: Mapping[Place, Any]
    """What it measured, if one of the run's steps has its task."""


@dataclass(frozen=True)
class StepCheck:
    fit: Fit
    detail: str = ""
    not_measurable: tuple[str, ...] = ()
    """What evaluate.py tried and could not measure, with the reason."""
    recorded: bool = True
    """False if the file is of an older version, which did not record all its settings."""
    files: tuple[ResultFile, ...] = ()
    """Those that count."""
    left_out: tuple[tuple[Fit, Path, str], ...] = ()
    """Files that answer the same question otherwise: how they relate to it, and why."""


@dataclass(frozen=True)
class Question:
    """What a step needs: its task, and what evaluate.py would record with the run's config."""

    task: EvaluationTask
    expected: Content
    wanted: list[Place]
    """The cells that a complete answer has."""
    first_method: str
    """The model's pos_emb, by which earlier results name a layer_pattern."""

    @classmethod
    def of(cls, run: Run, step: Step) -> Question:
        from megatron.evaluation.task_registry import find_task  # both import torch
        from megatron.evaluation.tasks import EvaluationOptions, requested

        args = NeoXArgs.from_dict({**run.config, **step.overrides})
        options, task = EvaluationOptions.from_args(args), find_task(step.task)
        expected = requested(task, options, args.model.model_dump(mode="json"))
        expected["pos_emb"] = args.model.method
        first = canonical_method(args.model.pos_emb)
        return cls(task, expected, task.wanted(options, run.splits), first)

    def differences(self, result: Result) -> str:
        """Settings that are not the suite's; empty if all that is recorded agrees."""
        expected = self.task.comparable(self.expected["settings"])
        if result.settings is not None:
            found = self.task.comparable(result.settings)
            keys = {**expected, **found}
        else:  # older files did not record all
            found = self.task.comparable_in_old_file(result.results)
            keys = found
        header = [*_HEADER, *(key for key in ("protocol", "data_seed") if key in expected)]
        facts = [(key, self._recorded(result, key), self.expected[key]) for key in header]
        facts += [(key, found.get(key), expected.get(key)) for key in keys]
        wrong = [f"{key} {was} instead of {asked}" for key, was, asked in facts if was != asked]
        return ", ".join(dict.fromkeys(wrong))

    def _recorded(self, result: Result, key: str) -> Any:
        if key == "pos_emb":
            name = "+".join(map(canonical_method, result.pos_emb.split("+")))
            return self.expected[key] if name == self.first_method else name
        if key == "data_seed" and result.data_seed is None:
            return result.seed
        return getattr(result, key)

    def outdated(self, result: Result, run: Run) -> str:
        """Why the file is not of the run's last checkpoint or data; empty if it is."""
        last = int(run.config["train_iters"])
        if result.iteration != last:
            return f"of step {result.iteration}, and the run ends at {last}"
        current = weights_id(run.directory / f"global_step{last}") if result.checkpoint_id else None
        if current is not None and current != result.checkpoint_id:
            return "of other weights than the checkpoint has now"
        sizes = {
            _file_of(item): item["bytes"] for item in self.expected["settings"].get("data", [])
        }
        for item in (result.settings or {}).get("data") or []:
            now = sizes.get(_file_of(item))
            if item.get("bytes") and now and now != item["bytes"]:
                return f"of other data than {run.config.get('data_path')}.bin holds now"
        return ""

    def is_about(self, file: ResultFile, step: Step) -> bool:
        """The step's task, at its window, at its length, with a variant's settings."""
        result = file.result
        if (result.task, result.window) != (self.expected["task"], self.expected["window"]):
            return False
        recorded = (result.settings or {}).get("model") or {}
        asked = self.expected["settings"]["model"]  # nested ones with all their keys
        if any(recorded.get(key) != asked.get(key) for key, _ in step.settings):
            return False
        return step.length is None or step.length in {length for _, length in file.cells}


def _file_of(item: Mapping[str, Any]) -> tuple[Any, str]:
    return item.get("split"), Path(item["prefix"]).name


class ResultFiles:
    """The result files of one run directory, and which of them answer the question of a step."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.problems: list[str] = []
        """Files that could not be read."""
        self.other_training = training_differences(run)
        self._questions = {step: Question.of(run, step) for step in run.evaluations}
        self._files: list[ResultFile] = []
        for path in sorted((run.directory / "results").glob("*.json")):
            try:
                self._files.append(self._checked(path))
            except EvaluationError as error:
                self.problems.append(str(error))
        # Where an older file agrees with a newer one, the newer one is read last and stays.
        self._files.sort(key=lambda file: file.result.format)

    def _checked(self, path: Path) -> ResultFile:
        """A result whose content the task that it is of can read."""
        result = read_result(path)
        cells: Mapping[Place, Any] = {}
        try:
            for question in self._questions.values():
                if question.expected["task"] == result.task:
                    cells = cells or question.task.cells(result.results)
                    question.differences(result)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise not_a_result(path, error) from error
        return ResultFile(path, result, cells)

    def check(self, step: Step) -> StepCheck:
        wanted, (good, bad) = self.wanted(step), self._sort(step)
        checked = partial(StepCheck, files=tuple(good), left_out=tuple(bad))
        failed = _failed_cells(file.result for file in good)
        measured = {place for file in good for place in file.cells}
        absent = [cell for cell in wanted if cell not in measured and cell not in failed]
        if good and not absent:
            notes = tuple(f"{s} at {n}: {failed[s, n]}" for s, n in wanted if (s, n) in failed)
            recorded = all(file.result.settings is not None for file in good)
            return checked(Fit.COMPLETE, not_measurable=notes, recorded=recorded)
        if bad:
            fit, path, why = bad[-1]
            return checked(fit, f"{path.name} is {why}")
        missing = ", ".join(f"{group} {length}" for group, length in absent)
        return checked(Fit.MISSING, f"not measured: {missing}" if good else "no result")

    def wanted(self, step: Step) -> list[Place]:
        return self._questions[step].wanted

    def _sort(self, step: Step) -> tuple[list[ResultFile], list[tuple[Fit, Path, str]]]:
        """Those that count, and those that are of something else."""
        good: list[ResultFile] = []
        bad: list[tuple[Fit, Path, str]] = []
        question = self._questions[step]
        for file in self._files:
            if not question.is_about(file, step):
                continue
            if self.other_training:
                bad.append((Fit.FOREIGN, file.path, self.other_training))
            elif why := question.differences(file.result):
                if any(
                    other.is_about(file, at) and not other.differences(file.result)
                    for at, other in self._questions.items()
                ):
                    continue  # another variant's
                bad.append((Fit.FOREIGN, file.path, why))
            elif why := question.outdated(file.result, self.run):
                bad.append((Fit.OUTDATED, file.path, why))
            else:
                good.append(file)
        return good, bad


def _failed_cells(results: Iterable[Result]) -> dict[tuple[str, float | None], str]:
    """What evaluate.py tried and could not measure, by split or kind and length: the reason."""
    return {
        (str(error.get("split") or error.get("kind")), finite(error.get("length"))): str(
            error.get("error")
        )
        for result in results
        for error in result.errors
    }


def check_steps(run: Run) -> dict[str, StepCheck]:
    """Every evaluation of a run: is its result there, and the one that the suite asks for?"""
    files = ResultFiles(run)
    return {step.name: files.check(step) for step in run.evaluations}


def done_steps(run: Run, checks: Mapping[str, StepCheck] | None = None) -> set[str]:
    """Names of finished steps: training by its marker, an evaluation by results of use here.

    `checks` are those of `check_steps`, where they have been made before.
    """
    if not trained(run):
        return set()
    found = check_steps(run) if checks is None else checks
    return {TRAIN.name, *(name for name, check in found.items() if check.fit is Fit.COMPLETE)}


def is_finished(run: Run, checks: Mapping[str, StepCheck] | None = None) -> bool:
    return done_steps(run, checks) == {step.name for step in run.steps}
