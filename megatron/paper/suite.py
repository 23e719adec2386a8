"""A suite expanded into runs (model x data x method x seed), each with its complete config."""

from __future__ import annotations

import fnmatch
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from megatron.atomic_files import fingerprint
from megatron.errors import ReproduceError
from megatron.neox_arguments import FACTS, NeoXArgs, changes_training
from megatron.neox_arguments.allowed_code import allow_flags
from megatron.neox_arguments.normalize import canonical_key
from megatron.neox_arguments.yaml_files import parse_yaml
from megatron.paper.suite_file import (
    PERPLEXITY,
    POSITIONWISE,
    DataSet,
    Point,
    Section,
    SuiteFile,
    read_suite_file,
)
from megatron.paper.suite_references import check_references, check_run

_COUNTS = ("seq_length", "train_iters", "num_layers", "hidden_size", "num_attention_heads")
_BATCH_KEYS = frozenset(
    {"num_gpus", "model_parallel_size", "pipe_parallel_size", "sequence_parallel_size"}
)
"""They say how a run is executed, but the size of its batch follows from them."""


@dataclass(frozen=True)
class Step:
    """One call of train.py, or of evaluate.py on the finished run."""

    task: str
    length: int | None = None
    window: int | None = None
    variant: str = ""
    settings: tuple[tuple[str, Any], ...] = field(default=(), hash=False)
    """What the variant changes in the model's config."""

    @property
    def name(self) -> str:
        parts = [self.task, str(self.length or ""), f"w{self.window}" if self.window else ""]
        return "-".join(part for part in [*parts, self.variant] if part)

    @property
    def overrides(self) -> dict[str, Any]:
        """Config keys that evaluate.py is given for this step."""
        keys = dict(self.settings)
        if self.length is not None:
            keys["eval_lengths"] = [self.length]
        if self.window is not None:
            keys["eval_window"] = self.window
        return keys


TRAIN = Step("train")


@dataclass(frozen=True)
class Run:
    """One training run and the evaluations of its last checkpoint."""

    name: str
    model: str
    data: str
    method: str
    seed: int
    gpus: int
    config: Mapping[str, Any]
    directory: Path = Path()
    """Where its files are; train.py may be told to save elsewhere."""
    sections: tuple[str, ...] = ()
    evaluations: tuple[Step, ...] = ()
    splits: tuple[str, ...] = ("valid",)
    """Those that the report shows; both are evaluated."""
    base: Run | None = None
    """The run whose weights it begins with."""

    @property
    def train_length(self) -> int:
        return int(self.config["seq_length"])

    @property
    def training_tokens(self) -> int:
        batch = NeoXArgs.from_dict(dict(self.config)).batch_plan(self.gpus)
        return int(self.config["train_iters"]) * batch.train_batch_size * self.train_length

    @property
    def steps(self) -> tuple[Step, ...]:
        """All of them, in order."""
        return (TRAIN, *self.evaluations)

    @property
    def train_hash(self) -> str:
        """Of everything that training depends on: evaluation settings may change later."""
        own = trained_with(self.config)
        return fingerprint(own if self.base is None else [self.base.train_hash, own])

    def step_hash(self, step: Step) -> str:
        if step == TRAIN:
            return self.train_hash
        kept = {key: value for key, value in self.config.items() if key.startswith("eval_")}
        changed = [dict(step.settings)] if step.settings else []
        return fingerprint([self.train_hash, kept, step.task, step.length, step.window, *changed])


def trained_with(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that training depends on, by their declarations."""
    return {key: value for key, value in config.items() if _changes_training(canonical_key(key))}


def _changes_training(key: str) -> bool:
    return key in _BATCH_KEYS or key not in FACTS or changes_training(key)


def train_hash_by_name(config: Mapping[str, Any]) -> str:
    """The train hash of version 0.1, which knew evaluation keys by their names."""
    kept = {
        key: value
        for key, value in config.items()
        if not key.startswith("eval_") and key not in ("save", "load")
    }
    return fingerprint(kept)


@dataclass(frozen=True)
class Suite:
    """A suite file, or the parts of it that were asked for, as runs."""

    name: str
    file: SuiteFile
    sections: tuple[Section, ...]
    runs: tuple[Run, ...]
    runs_root: Path
    data_root: Path
    source: str = ""
    """What --suite named."""

    @property
    def directory(self) -> Path:
        return self.runs_root / self.name

    @property
    def flags(self) -> str:
        """Those with which a command of reproduce.py finds this suite again."""
        classes = [allow_flags(run.config) for run in self.runs]
        place = f"--suite {shlex.quote(self.source)} --runs {shlex.quote(str(self.runs_root))}"
        return place + "".join(dict.fromkeys(classes))

    def run_named(self, name: str) -> Run:
        for run in self.runs:
            if run.name == name:
                return run
        raise ReproduceError(
            f"suite {self.name} has no run {name!r}: `plan --list` shows its runs; they are others "
            "than were submitted if the suite has changed since"
        )

    def runs_of(self, section: Section) -> list[Run]:
        return [run for run in self.runs if section.name in run.sections]

    def data_of(self, section: Section) -> tuple[DataSet, ...]:
        return tuple(self.file.data[name] for name in section.data)

    @property
    def used_data(self) -> list[DataSet]:
        return [self.file.data[name] for name in dict.fromkeys(run.data for run in self.runs)]


def load_suite(
    name: str,
    only: Iterable[str] = (),
    *,
    runs_root: str | Path = "runs",
    data_root: str | Path = "data",
    sets: Mapping[str, Any] | None = None,
) -> Suite:
    """Read a suite and expand it; `name` may be "paper/main" for one section.

    `sets` are config keys for all runs, as with deepy.py's --set.
    """
    base, _, part = name.partition("/") if not name.endswith((".yml", ".yaml")) else (name, "", "")
    chosen = [*only, part] if part else list(only)
    file, stem = read_suite_file(base), Path(base).stem
    check_references(base, file)
    expansion = _Expansion(stem, file, Path(runs_root), Path(data_root), sets or {})
    runs, sections = expansion.runs(), list(file.sections.values())
    names = {run.name for run in runs}
    if chosen:
        runs, sections = _select(stem, runs, sections, chosen)
    tables = tuple(expansion.with_table(section) for section in sections)
    _check_configs(stem, runs, names)
    return Suite(stem, file, tables, tuple(runs), Path(runs_root), Path(data_root), base)


def parsed_sets(items: Iterable[str]) -> dict[str, Any]:
    """The values of `--set KEY=VALUE ...`."""
    values: dict[str, Any] = {}
    for item in items:
        key, separator, text = item.partition("=")
        if not separator or not key:
            raise ReproduceError(f"--set {item:.80}: expected KEY=VALUE")
        values[key.strip().replace("-", "_")] = parse_yaml(text, f"--set {item}")
    return values


def _check_configs(suite: str, runs: Iterable[Run], names: set[str]) -> None:
    """What train.py or evaluate.py would refuse is refused before anything starts."""
    for run in runs:
        where = f"suite {suite}: run {run.name}"
        for key in _COUNTS:
            _count(run.config, key, where)
        check_run(where, run, names)


class _Expansion:
    def __init__(
        self, name: str, file: SuiteFile, runs_root: Path, data_root: Path, sets: Mapping[str, Any]
    ) -> None:
        self._name, self._file, self._sets = name, file, sets
        self._runs_root, self._data_root = runs_root, data_root

    def runs(self) -> list[Run]:
        runs: dict[str, Run] = {}
        for section in self._file.sections.values():
            for place in product(
                section.models, section.data, section.methods, section.seeds or self._file.seeds
            ):
                run = self._run(section, *place)
                runs[run.name] = _merge(runs[run.name], run) if run.name in runs else run
        return [self._with_lengths(run) for run in runs.values()]

    def _model(self, name: str) -> tuple[dict[str, Any], int]:
        """The config of a model and of those that it extends, and its GPUs."""
        model = self._file.models[name]
        config, gpus = self._model(model.extends) if model.extends else ({}, 1)
        shape = {key: value for key, value in self._sets.items() if key != "eval_lengths"}
        return config | model.config | shape, model.gpus or gpus

    def _lengths(self, section: Section, model: str) -> list[int]:
        """The section's; with --set eval_lengths=[...] those, for every section that has some."""
        own, chosen = section.lengths_of(model), self._sets.get("eval_lengths")
        if not own or not chosen:
            return own
        if not isinstance(chosen, list) or not all(isinstance(item, int) for item in chosen):
            raise ReproduceError(f"--set eval_lengths={chosen}: expected a list as [512,1024]")
        return sorted(chosen)

    def _run(self, section: Section, model: str, data: str, method: str, seed: int) -> Run:
        config, gpus = self._model(model)
        name = f"{model}.{data}.{method}.{seed}"
        directory = self._runs_root / self._name / name
        config |= self._file.data[data].config | self._file.method_config.get(method, {})
        tokens = self._file.data[data].prefix(self._data_root)
        config |= {"pos_emb": method, "seed": seed, "data_path": tokens, "num_gpus": gpus}
        config |= {"save": directory.as_posix(), "load": directory.as_posix(), **self._sets}
        config["eval_lengths"] = lengths = self._lengths(section, model)
        longest = max(lengths, default=0) if "eval_lengths" in self._sets else None
        steps = [Step(task) for task in section.tasks] if lengths else []
        steps += [
            Step(POSITIONWISE, item.length, item.window)
            for item in section.positionwise
            if item.data == data and method in item.methods
            if longest is None or item.length <= longest
        ]
        steps += [
            Step(PERPLEXITY, variant=label, settings=tuple(variant.config.items()))
            for label, variant in section.variants.items()
            if method in variant.methods
        ]
        place = (directory, (section.name,), tuple(steps), tuple(self._file.splits))
        base = None
        if continued := self._file.models[model].continues:
            before, _, method_before = continued.partition(".")
            base = self._with_lengths(self._run(section, before, data, method_before, seed))
            config["load_positions"] = "fresh"
        return Run(name, model, data, method, seed, gpus, config, *place, base)

    def _with_lengths(self, run: Run) -> Run:
        """A run that no table reads has no lengths; `--set key=null` leaves a key out."""
        config = {
            key: value
            for key, value in run.config.items()
            if value != [] and not (value is None and key in self._sets)
        }
        return replace(run, config=dict(sorted(config.items())))

    def with_table(self, section: Section) -> Section:
        """The section's table with what follows from the rest of the file."""
        table = section.table
        if table is None:
            return section
        own = None if "eval_lengths" in self._sets else table.lengths
        where = f"suite {self._name}"
        trained_at = {
            model: _count(self._model(model)[0], "seq_length", f"{where}: model {model}")
            for model in section.models
        }
        if len(set(trained_at.values())) < len(trained_at):
            raise ReproduceError(
                f"{where}: section {section.name}: its table tells models apart by their training "
                f"length, and two of {', '.join(trained_at)} have the same: give each a section"
            )
        points = tuple(
            Point(train_length=train_length, length=length)
            for model, train_length in trained_at.items()
            for length in (self._lengths(section, model) if own is None else own)
        )
        filled = {
            "key": section.name,
            "methods": tuple(section.methods),
            "data": tuple(self._file.data[name] for name in section.data),
            "points": points,
        }
        return section.model_copy(update={"table": table.model_copy(update=filled)})


def _count(config: Mapping[str, Any], key: str, where: str) -> int:
    """A key that the suite itself counts with."""
    value = config.get(key)
    if type(value) is not int or value < 1:
        found = "is missing" if value is None else f"is {value!r:.80}"
        raise ReproduceError(f"{where}: {key} {found}; give it as a whole number above 0")
    return value


def _merge(first: Run, second: Run) -> Run:
    """The same model, data, method and seed in two sections is one run with both evaluations."""
    lengths = sorted({*first.config["eval_lengths"], *second.config["eval_lengths"]})
    return replace(
        first,
        config={**first.config, "eval_lengths": lengths},
        sections=(*first.sections, *second.sections),
        evaluations=(
            *first.evaluations,
            *(step for step in second.evaluations if step not in first.evaluations),
        ),
    )


def _select(
    suite: str, runs: list[Run], sections: list[Section], chosen: list[str]
) -> tuple[list[Run], list[Section]]:
    """Keep what --only names: sections, methods, data sets, or run names with wildcards.

    Names of the same kind add up, names of different kinds must all hold:
    `main alibi rpe` keeps the runs of section main with either method. A section that has the name
    of its data set (`wikitext103`) is meant as the section.
    """
    own = {section.name for section in sections}
    kinds = [own, {run.method for run in runs} - own, {run.data for run in runs} - own]
    names = set().union(*kinds)
    patterns = [item for item in chosen if item not in names]
    for item in patterns:
        if not any(fnmatch.fnmatch(run.name, item) for run in runs):
            raise ReproduceError(
                f"--only {item}: suite {suite} has no such section, method, data set or run "
                f"(have {', '.join(sorted(names))}, or a run name with wildcards)"
            )
    in_sections, methods, data = (kind & set(chosen) for kind in kinds)
    kept = [
        run
        for run in runs
        if (not in_sections or in_sections & set(run.sections))
        and (not methods or run.method in methods)
        and (not data or run.data in data)
        and (not patterns or any(fnmatch.fnmatch(run.name, pattern) for pattern in patterns))
    ]
    if not kept:
        raise ReproduceError(f"--only {' '.join(chosen)}: no run of suite {suite} matches all")
    with_runs = {name for run in kept for name in run.sections}
    return kept, [
        section.model_copy(
            update={
                "methods": [name for name in section.methods if not methods or name in methods],
                "data": [name for name in section.data if not data or name in data],
            }
        )
        for section in sections
        if section.name in with_runs and (not in_sections or section.name in in_sections)
    ]
