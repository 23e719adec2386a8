"""The chapter of one section: the tables and figures that its tasks ask for, kernels, training."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megatron.evaluation.task_registry import find_task
from megatron.evaluation.tasks import GroupView, PositionView, SplitView, View
from megatron.paper.figures import (
    group_by_length,
    perplexity_by_length,
    training_loss,
    training_speed,
)
from megatron.paper.kernel_figures import kernel_plots
from megatron.paper.pages import Chapter
from megatron.paper.position_figures import positionwise_perplexity
from megatron.paper.run_results import ResultSet
from megatron.paper.style import Plot, save_figures
from megatron.paper.suite import Run, Suite
from megatron.paper.suite_file import DataSet, Section, TableSpec
from megatron.paper.tables import (
    Table,
    group_table,
    lay_out,
    measured_cells,
    published_source,
    speed_table,
)


def section_chapter(suite: Suite, section: Section, results: ResultSet, directory: Path) -> Chapter:
    """Its figures are written to `directory`/figures."""
    parts = _Parts(suite, section, results.of_runs(suite.runs_of(section)))
    chapter = Chapter(section.title)
    parts.add_tables(chapter)
    chapter.figures = save_figures(parts.plots(), directory / "figures", f"{section.name}_")
    return chapter


@dataclass(frozen=True)
class _Parts:
    suite: Suite
    section: Section
    results: ResultSet

    @property
    def _data(self) -> tuple[DataSet, ...]:
        return self.suite.data_of(self.section)

    def _views(self) -> Iterator[tuple[str, View]]:
        """Of every task that the section names."""
        for name in self.section.all_tasks:
            yield from ((name, view) for view in find_task(name).views)

    def add_tables(self, chapter: Chapter) -> None:
        section = self.section
        for task, view in self._views():
            if isinstance(view, SplitView) and section.table:
                first, *others = self.suite.file.splits
                chapter.tables.append(self._split_table(section.table, first, first=True))
                chapter.folded += [self._split_table(section.table, s, first=False) for s in others]
            elif isinstance(view, GroupView) and view.table_caption:
                name = f"{section.name}_{view.key}" if chapter.tables else section.name
                for item, key in self._by_data(name):
                    values = partial(self.results.values, task, item.name)
                    chapter.tables.append(group_table(key, view, section.methods, values))
        if section.speed:
            methods, data = section.methods, section.speed_data
            seconds = {m: self.results.seconds_per_step(data, m) for m in methods}
            key, caption = f"{section.name}_speed", section.speed.caption
            chapter.tables.append(speed_table(key, caption, methods, seconds))

    def _by_data(self, name: str) -> list[tuple[DataSet, str]]:
        """Every data set with a name for its file; one alone needs no name of its own."""
        data = self._data
        return [(item, f"{name}_{item.name}" if len(data) > 1 else name) for item in data]

    def _split_table(self, spec: TableSpec, split: str, *, first: bool) -> Table:
        table = lay_out(
            spec,
            measured_cells(spec, partial(self.results.perplexity, split)),
            published_source(spec) if first else None,
        )
        key = spec.key if first else f"{spec.key}_{split}"
        return replace(table, key=key, caption=f"{table.caption} Split: {split}.")

    def plots(self) -> Iterator[Plot]:
        section, results, data = self.section, self.results, self._data
        for task, view in self._views():
            yield from self._task_plots(task, view)
        methods = section.methods
        if section.table:
            heads = heads_of(self.suite.runs_of(section))
            yield from kernel_plots(results.of_methods(methods), data, heads)
        if section.speed:
            speed = training_speed(results, section.speed_data, methods, machine_name())
            caption = "Median seconds per step, mean over runs, as a multiple of KERPLE-log's."
            yield Plot("speed", "Training time per step", caption, speed)
        if section.table:
            losses = training_loss(results, data, methods)
            caption = (
                "First seed of each method, as logged. Below, where KERPLE-log is among them: the "
                "loss minus KERPLE-log's of the same seed, which read the same batches."
            )
            yield Plot("loss", "Training loss", caption, losses)

    def _task_plots(self, task: str, view: View) -> Iterator[Plot]:
        section, results, split = self.section, self.results, self.suite.file.splits[0]
        title = view.title.format(split=split)
        if isinstance(view, SplitView) and section.table:
            figure = perplexity_by_length(results, split, self._data, section.methods)
            yield Plot(view.key, title, view.caption, figure)
        elif isinstance(view, PositionView):
            for item in self._data:
                figure = positionwise_perplexity(results, split, item, section.positionwise)
                yield Plot(f"{view.key}_{item.name}", title, view.caption, figure)
        elif isinstance(view, GroupView):
            for item, key in self._by_data(view.key):
                figure = group_by_length(results, task, view, item, section.methods)
                yield Plot(key, title, view.caption, figure)


def heads_of(runs: Sequence[Run]) -> int:
    return int(runs[0].config["num_attention_heads"]) if runs else 1


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
    found = re.search(r"^model name\s*:\s*(.*\S)", text, re.MULTILINE)
    return found[1] if found else platform.machine()
