"""A suite expanded into runs (model x data x method x seed), each with its complete config."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.errors import ReproduceError
from megatron.paper.cells import Rounding
from megatron.paper.suite_file import (
    ModelFile,
    PositionwiseFile,
    SectionFile,
    SuiteFile,
    read_suite_file,
)
from megatron.paper.tables import DataSet, Layout, Point, TableSpec

__all__ = ["DataSource", "EvalStep", "Run", "Section", "Suite", "load_suite"]


_PLACES = frozenset({"save", "load"})
"""A run may move to another disk and is still the same run."""


@dataclass(frozen=True)
class DataSource:
    """A data set and how prepare_data.py makes it."""

    name: str
    title: str
    source: str
    directory: str
    arguments: tuple[str, ...] = ()
    published: str | None = None
    raw_gigabytes: float | None = None

    @property
    def prefix(self) -> str:
        return f"{self.directory}/{self.source}/{self.source}_text_document"


@dataclass(frozen=True)
class EvalStep:
    """One call of evaluate.py on a finished run."""

    task: str
    length: int | None = None
    window: int | None = None

    @property
    def name(self) -> str:
        parts = [self.task, str(self.length or ""), f"w{self.window}" if self.window else ""]
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
        return _hash(kept)

    def step_hash(self, step: EvalStep) -> str:
        kept = {key: value for key, value in self.config.items() if key.startswith("eval_")}
        return _hash([self.train_hash, kept, step.task, step.length, step.window])


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    methods: tuple[str, ...]
    data: tuple[DataSet, ...]
    models: tuple[str, ...]
    table: TableSpec | None = None
    speed_caption: str | None = None
    speed_data: tuple[str, ...] = ()
    positionwise: tuple[PositionwiseFile, ...] = ()


@dataclass(frozen=True)
class Suite:
    name: str
    about: str
    splits: tuple[str, ...]
    sections: tuple[Section, ...]
    runs: tuple[Run, ...]
    data: Mapping[str, DataSource] = field(default_factory=dict)

    def run_directory(self, root: Path, run: Run) -> Path:
        return root / self.name / run.name

    @property
    def used_data(self) -> list[DataSource]:
        names = dict.fromkeys(run.data for run in self.runs)
        return [self.data[name] for name in names]


def _hash(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
    return _select(suite, chosen) if chosen else suite


class _Expansion:
    def __init__(
        self, name: str, file: SuiteFile, runs_root: Path, data_root: Path, sets: Mapping[str, Any]
    ) -> None:
        self._name = name
        self._file = file
        self._runs_root = runs_root
        self._sets = sets
        self._data = {
            key: DataSource(
                key,
                item.title,
                item.source or key,
                data_root.as_posix(),
                tuple(item.prepare),
                item.published,
                item.raw_gigabytes,
            )
            for key, item in file.data.items()
        }

    def suite(self) -> Suite:
        runs: dict[str, Run] = {}
        for name, section in self._file.sections.items():
            for run in self._section_runs(name, section):
                runs[run.name] = _merge(runs[run.name], run) if run.name in runs else run
        sections = tuple(
            self._section(name, section) for name, section in self._file.sections.items()
        )
        return Suite(
            self._name,
            self._file.about,
            tuple(self._file.splits),
            sections,
            tuple(self._with_lengths(run) for run in runs.values()),
            self._data,
        )

    def _model(self, name: str) -> tuple[dict[str, Any], int]:
        chain: list[ModelFile] = []
        following: str | None = name
        while following is not None:
            if len(chain) > len(self._file.models):
                raise ReproduceError(f"suite {self._name}: model {name} extends itself")
            chain.append(self._file.models[following])
            following = chain[-1].extends
        config: dict[str, Any] = {}
        gpus = 1
        for model in reversed(chain):
            config |= model.config
            gpus = model.gpus or gpus
        return config, gpus

    def _section_runs(self, name: str, section: SectionFile) -> Iterable[Run]:
        for model in section.models:
            for data in section.data:
                for method in section.methods:
                    for seed in section.seeds or self._file.seeds:
                        yield self._run(name, section, model, data, method, seed)

    def _run(
        self, section_name: str, section: SectionFile, model: str, data: str, method: str, seed: int
    ) -> Run:
        config, gpus = self._model(model)
        name = f"{model}.{data}.{method}.{seed}"
        directory = (self._runs_root / self._name / name).as_posix()
        config |= self._file.data[data].config | self._file.method_config.get(method, {})
        config |= {"pos_emb": method, "seed": seed, "data_path": self._data[data].prefix}
        config |= {"save": directory, "load": directory, "num_gpus": gpus, **self._sets}
        lengths = _lengths(section, model)
        steps = [EvalStep("extrapolation")] if lengths else []
        steps += [
            EvalStep("positionwise", item.length, item.window)
            for item in section.positionwise
            if item.data == data and method in item.methods
        ]
        config["eval_lengths"] = lengths
        return Run(name, model, data, method, seed, gpus, config, (section_name,), tuple(steps))

    def _with_lengths(self, run: Run) -> Run:
        """Keys that follow from others; a run that no table reads has no lengths."""
        config = {key: value for key, value in run.config.items() if value != []}
        return replace(run, config=dict(sorted(config.items())))

    def _section(self, name: str, section: SectionFile) -> Section:
        data = tuple(
            DataSet(key, self._file.data[key].title, self._file.data[key].published)
            for key in section.data
        )
        speed = section.speed
        return Section(
            name,
            section.title,
            tuple(section.methods),
            data,
            tuple(section.models),
            self._table(name, section, data),
            speed.caption if speed else None,
            tuple(speed.data or section.data) if speed else (),
            tuple(section.positionwise),
        )

    def _table(
        self, name: str, section: SectionFile, data: tuple[DataSet, ...]
    ) -> TableSpec | None:
        table = section.table
        if table is None:
            return None
        points = [
            Point(int(self._model(model)[0]["seq_length"]), length)
            for model in section.models
            for length in table.lengths or _lengths(section, model)
        ]
        return TableSpec(
            key=name,
            caption=table.caption,
            layout=Layout(table.layout),
            methods=tuple(section.methods),
            data=data,
            points=tuple(points),
            rounding=Rounding(table.rounding),
            integer_methods=tuple(table.integer_methods),
            full_labels=table.full_labels,
            mark_best=table.mark_best,
            mark_significance=table.mark_significance,
            published_table=table.published,
            published_train_length=table.published_train_length,
        )


def _lengths(section: SectionFile, model: str) -> list[int]:
    if isinstance(section.lengths, dict):
        return list(section.lengths.get(model, []))
    return list(section.lengths)


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
    kept_methods = tuple(name for name in section.methods if not methods or name in methods)
    kept_data = tuple(item for item in section.data if not data or item.name in data)
    table = section.table and replace(section.table, methods=kept_methods, data=kept_data)
    return replace(section, methods=kept_methods, data=kept_data, table=table)
