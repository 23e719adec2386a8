"""A suite expanded into runs (model x data x method x seed), each with its complete config."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.atomic_files import fingerprint
from megatron.errors import ConfigError, ReproduceError
from megatron.neox_arguments import NeoXArgs
from megatron.paper.suite_file import (
    Contrast,
    DataSet,
    Model,
    Point,
    Section,
    SuiteFile,
    TableSpec,
    read_suite_file,
)

_COUNTS = ("seq_length", "train_iters", "num_layers", "hidden_size", "num_attention_heads")
_PLACES = frozenset({"save", "load"})
"""A run may move to another disk and is still the same run."""


@dataclass(frozen=True)
class EvalStep:
    """One call of evaluate.py on a finished run."""

    task: str
    length: int | None = None
    window: int | None = None
    variant: str = ""
    settings: tuple[tuple[str, Any], ...] = ()
    """What the variant changes in the model's config."""

    @property
    def name(self) -> str:
        parts = [self.task, str(self.length or ""), f"w{self.window}" if self.window else ""]
        parts.append(self.variant)
        return "-".join(part for part in parts if part)


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
    sections: tuple[str, ...] = ()
    evaluations: tuple[EvalStep, ...] = ()
    splits: tuple[str, ...] = ("valid",)
    """Those that the report shows; both are evaluated."""

    @property
    def train_length(self) -> int:
        return int(self.config["seq_length"])

    @property
    def train_hash(self) -> str:
        """Of everything that training depends on: evaluation settings may change later."""
        kept = {
            key: value
            for key, value in self.config.items()
            if not key.startswith("eval_") and key not in _PLACES
        }
        return fingerprint(kept)

    def step_hash(self, step: EvalStep) -> str:
        kept = {key: value for key, value in self.config.items() if key.startswith("eval_")}
        changed = [dict(step.settings)] if step.settings else []
        return fingerprint([self.train_hash, kept, step.task, step.length, step.window, *changed])


@dataclass(frozen=True)
class Suite:
    name: str
    about: str
    splits: tuple[str, ...]
    sections: tuple[Section, ...]
    runs: tuple[Run, ...]
    data: Mapping[str, DataSet]
    data_root: Path
    contrasts: Mapping[str, Contrast] = field(default_factory=dict)
    differs: tuple[str, ...] = ()

    def run_directory(self, root: Path, run: Run) -> Path:
        return root / self.name / run.name

    def run_named(self, name: str) -> Run:
        for run in self.runs:
            if run.name == name:
                return run
        raise ReproduceError(f"suite {self.name} has no run {name!r}: it changed after submission")

    def runs_of(self, section: Section) -> list[Run]:
        return [run for run in self.runs if section.name in run.sections]

    def data_of(self, section: Section) -> tuple[DataSet, ...]:
        return tuple(self.data[name] for name in section.data)

    @property
    def used_data(self) -> list[DataSet]:
        names = dict.fromkeys(run.data for run in self.runs)
        return [self.data[name] for name in names]


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
    file = read_suite_file(base)
    expansion = _Expansion(Path(base).stem, file, Path(runs_root), Path(data_root), sets or {})
    suite = expansion.suite()
    selected = _select(suite, chosen) if chosen else suite
    _check_configs(selected)
    return selected


def _check_configs(suite: Suite) -> None:
    """What train.py would refuse is refused before anything starts, once for all seeds."""
    checked: set[tuple[str, str, str]] = set()
    for run in suite.runs:
        kind = (run.model, run.data, run.method)
        if kind in checked:
            continue
        checked.add(kind)
        for key in _COUNTS:
            _count(run.config, key, f"suite {suite.name}: run {run.name}")
        try:
            NeoXArgs.from_dict(dict(run.config))
        except ConfigError as error:
            raise ReproduceError(f"suite {suite.name}: run {run.name}: {error}") from error


class _Expansion:
    def __init__(
        self, name: str, file: SuiteFile, runs_root: Path, data_root: Path, sets: Mapping[str, Any]
    ) -> None:
        self._name, self._file, self._sets = name, file, sets
        self._runs_root, self._data_root = runs_root, data_root

    def suite(self) -> Suite:
        runs: dict[str, Run] = {}
        for name, section in self._file.sections.items():
            for run in self._section_runs(name, section):
                runs[run.name] = _merge(runs[run.name], run) if run.name in runs else run
        complete = tuple(self._with_lengths(run) for run in runs.values())
        return Suite(
            self._name,
            self._file.about,
            tuple(self._file.splits),
            tuple(self._with_table(section) for section in self._file.sections.values()),
            complete,
            self._file.data,
            self._data_root,
            self._file.contrasts,
            tuple(self._file.differs),
        )

    def _model(self, name: str) -> tuple[dict[str, Any], int]:
        chain: list[Model] = []
        following: str | None = name
        while following is not None:
            chain.append(self._file.models[following])
            following = chain[-1].extends
        config: dict[str, Any] = {}
        gpus = 1
        for model in reversed(chain):
            config |= model.config
            gpus = model.gpus or gpus
        shape = {key: value for key, value in self._sets.items() if key != "eval_lengths"}
        return config | shape, gpus

    def _lengths(self, section: Section, model: str) -> list[int]:
        """The section's; with --set eval_lengths=[...] those, for every section that has some."""
        own, chosen = section.lengths_of(model), self._sets.get("eval_lengths")
        if not own or not chosen:
            return own
        if not isinstance(chosen, list) or not all(isinstance(item, int) for item in chosen):
            raise ReproduceError(f"--set eval_lengths={chosen}: expected a list as [512,1024]")
        return sorted(chosen)

    def _section_runs(self, name: str, section: Section) -> Iterable[Run]:
        for model in section.models:
            for data in section.data:
                for method in section.methods:
                    for seed in section.seeds or self._file.seeds:
                        yield self._run(name, section, model, data, method, seed)

    def _run(
        self, section_name: str, section: Section, model: str, data: str, method: str, seed: int
    ) -> Run:
        config, gpus = self._model(model)
        name = f"{model}.{data}.{method}.{seed}"
        directory = (self._runs_root / self._name / name).as_posix()
        config |= self._file.data[data].config | self._file.method_config.get(method, {})
        tokens = self._file.data[data].prefix(self._data_root)
        config |= {"pos_emb": method, "seed": seed, "data_path": tokens}
        config |= {"save": directory, "load": directory, "num_gpus": gpus, **self._sets}
        lengths = self._lengths(section, model)
        longest = max(lengths, default=0) if "eval_lengths" in self._sets else None
        steps = [EvalStep(task) for task in section.tasks] if lengths else []
        steps += [
            EvalStep("positionwise", item.length, item.window)
            for item in section.positionwise
            if item.data == data and method in item.methods
            if longest is None or item.length <= longest
        ]
        steps += [
            EvalStep("extrapolation", variant=label, settings=tuple(variant.config.items()))
            for label, variant in section.variants.items()
            if method in variant.methods
        ]
        config["eval_lengths"] = lengths
        splits = tuple(self._file.splits)
        identity = (name, model, data, method, seed, gpus)
        return Run(*identity, config, (section_name,), tuple(steps), splits)

    def _with_lengths(self, run: Run) -> Run:
        """A run that no table reads has no lengths; `--set key=null` leaves a key out."""
        config = {
            key: value
            for key, value in run.config.items()
            if value != [] and not (value is None and key in self._sets)
        }
        return replace(run, config=dict(sorted(config.items())))

    def _table_lengths(self, section: Section, table: TableSpec, model: str) -> list[int]:
        if "eval_lengths" in self._sets or table.lengths is None:
            return self._lengths(section, model)
        return list(table.lengths)

    def _train_length(self, model: str) -> int:
        return _count(self._model(model)[0], "seq_length", f"suite {self._name}: model {model}")

    def _with_table(self, section: Section) -> Section:
        """The section's table with what follows from the rest of the file."""
        table = section.table
        if table is None:
            return section
        points = tuple(
            Point(train_length=self._train_length(model), length=length)
            for model in section.models
            for length in self._table_lengths(section, table, model)
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
        evaluations=tuple(dict.fromkeys([*first.evaluations, *second.evaluations])),
    )


def _select(suite: Suite, chosen: list[str]) -> Suite:
    """Keep what --only names: sections, methods, data sets, or run names with wildcards.

    Names of the same kind add up, names of different kinds must all hold:
    `main alibi rpe` keeps the runs of section main with either method.
    """
    section_names = {section.name for section in suite.sections}
    methods = {run.method for run in suite.runs}
    data = {run.data for run in suite.runs}
    unknown = [
        item
        for item in chosen
        if item not in section_names | methods | data
        and not any(fnmatch.fnmatch(run.name, item) for run in suite.runs)
    ]
    if unknown:
        known = ", ".join(sorted(section_names | methods | data))
        raise ReproduceError(
            f"--only {unknown[0]}: suite {suite.name} has no such section, method, data set or run "
            f"(have {known}, or a run name with wildcards)"
        )
    kinds = [
        (section_names & set(chosen), lambda run: set(run.sections)),
        (methods & set(chosen), lambda run: {run.method}),
        (data & set(chosen), lambda run: {run.data}),
    ]
    patterns = [item for item in chosen if item not in section_names | methods | data]
    runs = [
        run
        for run in suite.runs
        if all(not wanted or wanted & values(run) for wanted, values in kinds)
        and (not patterns or any(fnmatch.fnmatch(run.name, pattern) for pattern in patterns))
    ]
    if not runs:
        raise ReproduceError(f"--only {' '.join(chosen)}: no run of suite {suite.name} matches all")
    wanted_sections = (section_names & set(chosen)) or {
        name for run in runs for name in run.sections
    }
    sections = tuple(
        _narrowed(section, methods & set(chosen), data & set(chosen))
        for section in suite.sections
        if section.name in wanted_sections
    )
    return replace(suite, sections=sections, runs=tuple(runs))


def _narrowed(section: Section, methods: set[str], data: set[str]) -> Section:
    """The section's tables with the chosen methods and data sets only."""
    kept_methods = [name for name in section.methods if not methods or name in methods]
    kept_data = [name for name in section.data if not data or name in data]
    kept: dict[str, Any] = {"methods": kept_methods, "data": kept_data}
    if section.table:
        kept["table"] = section.table.model_copy(
            update={
                "methods": tuple(kept_methods),
                "data": tuple(item for item in section.table.data if item.name in kept_data),
            }
        )
    return section.model_copy(update=kept)
