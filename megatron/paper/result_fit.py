"""Does a result file answer the suite's question? What does not is named, never mixed in.

A file counts if it was made with the suite's settings from the run's last checkpoint; otherwise it
is outdated (of another checkpoint or other data) or foreign (made with other settings).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from megatron.data.recall_text import RECALL_KINDS
from megatron.errors import EvaluationError
from megatron.evaluation.results_schema import MODEL_KEYS, Result, read_result, weights_id
from megatron.neox_arguments.catalogue import canonical_method
from megatron.neox_arguments.run_keys import EvaluationArgs
from megatron.paper.run_files import finite, trained, training_differences
from megatron.paper.suite import TRAIN, Run, Step

_DEFAULTS = EvaluationArgs()
RECALL = "recall"


class Fit(str, Enum):
    """How a step's results on disk relate to what the suite asks for."""

    COMPLETE = "complete"
    MISSING = "missing"
    OUTDATED = "outdated"
    FOREIGN = "foreign"


@dataclass(frozen=True)
class StepCheck:
    fit: Fit
    detail: str = ""
    not_measurable: tuple[str, ...] = ()
    """What evaluate.py tried and could not measure, with the reason."""
    recorded: bool = True
    """False if the file is of an older version, which did not record all its settings."""
    results: tuple[Result, ...] = ()
    """Those that count."""
    left_out: tuple[tuple[Fit, Path, str], ...] = ()
    """Files that answer the same question otherwise: how they relate to it, and why."""


def _expected(run: Run, step: Step) -> dict[str, Any]:
    config = {**run.config, **dict(step.settings)}
    lengths = [step.length] if step.length else list(config.get("eval_lengths", []))
    protocol = config.get("eval_protocol") or _DEFAULTS.eval_protocol
    expected = {
        "seed": run.seed,
        "pos_emb": canonical_method(run.method),
        "train_length": run.train_length,
        "window": step.window,
        "eval_protocol": protocol,
        "eval_num_sequences": config.get("eval_num_sequences") or _DEFAULTS.eval_num_sequences,
        "data_seed": config.get("data_seed") or run.seed,
        "data": Path(str(config.get("data_path"))).name,
        "split": str(config.get("split")),
        "model settings": {key: config[key] for key in MODEL_KEYS if config.get(key)},
    }
    if step.task == RECALL:  # makes its own text
        about_text = ("eval_protocol", "eval_num_sequences", "data", "split")
        return {key: value for key, value in expected.items() if key not in about_text}
    if protocol == "fixed_tokens" or step.length:
        # The tokens that are compared, and the length that is looked at, follow from the longest.
        expected["longest length"] = max(lengths, default=0)
    if step.task == "positionwise":
        kind = config.get("positionwise_buckets") or "log"
        expected["buckets"] = [kind, config.get("positionwise_bucket_count")]
    return expected


def _recorded(result: Result, step: Step) -> dict[str, Any]:
    """The same facts of a file; older ones did not record all."""
    facts: dict[str, Any] = {
        "seed": result.seed,
        "pos_emb": canonical_method(result.pos_emb),
        "train_length": result.train_length,
        "window": result.window,
        "eval_protocol": result.protocol,
        "data_seed": result.data_seed if result.data_seed is not None else result.seed,
    }
    settings = result.settings
    if settings is not None:
        data = settings.get("data") or []
        facts |= {
            "eval_num_sequences": settings.get("num_sequences"),
            "data": ", ".join(sorted({Path(item["prefix"]).name for item in data})),
            "split": ", ".join(sorted({str(item.get("share")) for item in data})),
            "longest length": max(settings.get("lengths") or [0]),
            "buckets": settings.get("buckets"),
            "model settings": settings.get("model") or {},
        }
        return facts
    # The number of sequences at the longest length; fewer than asked for if the split was small.
    if step.length:
        entries = [(item.length, item.sequences) for item in result.by_position().values()]
    else:
        lists = result.by_length().values()
        entries = [(item.length, item.sequences) for items in lists for item in items]
    longest, sequences = max(entries, default=(0, 0))
    return facts | {"eval_num_sequences": sequences, "longest length": longest}


def _differences(result: Result, run: Run, step: Step) -> str:
    """Settings that are not the suite's; empty if all that is recorded agrees."""
    expected, found = _expected(run, step), _recorded(result, step)
    return ", ".join(
        f"{key} {found[key]} instead of {value}"
        for key, value in expected.items()
        if key in found and found[key] != value
    )


def _outdated(result: Result, run: Run) -> str:
    """Why the file is not of the run's last checkpoint or data; empty if it is."""
    wanted = int(run.config["train_iters"])
    if result.iteration != wanted:
        return f"of step {result.iteration}, and the run ends at {wanted}"
    current = weights_id(run.directory / f"global_step{wanted}") if result.checkpoint_id else None
    if current is not None and current != result.checkpoint_id:
        return "of other weights than the checkpoint has now"
    for item in (result.settings or {}).get("data") or []:
        tokens = Path(str(run.config.get("data_path")) + ".bin")
        if item.get("bytes") and tokens.is_file() and tokens.stat().st_size != item["bytes"]:
            return f"of other data than {tokens} holds now"
    return ""


def _answers(result: Result, step: Step) -> bool:
    """The step's task, at its window, at its length by position, with a variant's settings."""
    if result.task.removesuffix("_windowed") != step.task or result.window != step.window:
        return False
    recorded = (result.settings or {}).get("model") or {}
    if any(recorded.get(key) != value for key, value in step.settings):
        return False
    if step.length is None:
        return True
    return any(entry.length == step.length for entry in result.by_position().values())


class ResultFiles:
    """The result files of one run directory, and which of them answer the question of a step."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.problems: list[str] = []
        """Files that could not be read."""
        self.other_training = training_differences(run)
        self._results: list[tuple[Path, Result]] = []
        for path in sorted((run.directory / "results").glob("*.json")):
            try:
                self._results.append((path, read_result(path)))
            except EvaluationError as error:
                self.problems.append(str(error))
        # Where an older file agrees with a newer one, the newer one is read last and stays.
        self._results.sort(key=lambda item: item[1].format)

    def check(self, step: Step) -> StepCheck:
        good, bad = self._sort(step)
        checked = partial(StepCheck, results=tuple(good), left_out=tuple(bad))
        wanted, failed = wanted_cells(self.run, step), _failed_cells(good)
        measured = {cell for result in good for cell in cells_of(result, step)}
        absent = [cell for cell in wanted if cell not in measured and cell not in failed]
        if good and not absent:
            notes = tuple(f"{s} at {n}: {failed[s, n]}" for s, n in wanted if (s, n) in failed)
            recorded = all(result.settings is not None for result in good)
            return checked(Fit.COMPLETE, not_measurable=notes, recorded=recorded)
        if bad:
            fit, path, why = bad[-1]
            return checked(fit, f"{path.name} is {why}")
        cells = ", ".join(f"{split} {length}" for split, length in absent)
        return checked(Fit.MISSING, f"not measured: {cells}" if good else "no result")

    def _sort(self, step: Step) -> tuple[list[Result], list[tuple[Fit, Path, str]]]:
        """Those that count, and those that are of something else."""
        good: list[Result] = []
        bad: list[tuple[Fit, Path, str]] = []
        for path, result in self._results:
            if not _answers(result, step):
                continue
            if self.other_training:
                bad.append((Fit.FOREIGN, path, self.other_training))
            elif why := _differences(result, self.run, step):
                if any(
                    _answers(result, other) and not _differences(result, self.run, other)
                    for other in self.run.evaluations
                ):
                    continue  # another variant's
                bad.append((Fit.FOREIGN, path, why))
            elif why := _outdated(result, self.run):
                bad.append((Fit.OUTDATED, path, why))
            else:
                good.append(result)
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


def wanted_cells(run: Run, step: Step) -> list[tuple[str, int]]:
    """By split, or by kind of recall, and length."""
    lengths = [step.length] if step.length else list(run.config.get("eval_lengths", []))
    groups = tuple(RECALL_KINDS) if step.task == RECALL else run.splits
    return [(group, int(length)) for group in groups for length in lengths]


def cells_of(result: Result, step: Step) -> dict[tuple[str, int], Any]:
    """What was measured: a share recalled, the losses by position, or a perplexity, if any."""
    if step.task == RECALL:
        return {(found.kind, found.length): found.accuracy for found in result.by_kind()}
    if step.length:
        return {(split, found.length): found for split, found in result.by_position().items()}
    return {
        (split, found.length): found.ppl if found.ppl is not None else _exp(found.loss)
        for split, entries in result.by_length().items()
        for found in entries
    }


def _exp(loss: float | None) -> float | None:
    try:
        return None if loss is None else math.exp(loss)
    except OverflowError:
        return math.inf


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
