"""All results of a suite, with the questions that tables, figures and claims ask of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from megatron.analysis.collect import Positionwise, RunResults
from megatron.analysis.tables import Point

__all__ = ["ResultSet"]


@dataclass(frozen=True)
class ResultSet:
    runs: tuple[RunResults, ...]

    def of_models(self, models: Iterable[str]) -> ResultSet:
        wanted = set(models)
        return ResultSet(tuple(run for run in self.runs if run.key.model in wanted))

    def of(self, data: str, method: str) -> list[RunResults]:
        return [run for run in self.runs if run.key.data == data and run.key.method == method]

    def methods(self) -> list[str]:
        return list(dict.fromkeys(run.key.method for run in self.runs))

    def data(self) -> list[str]:
        return list(dict.fromkeys(run.key.data for run in self.runs))

    def perplexity(self, split: str, data: str, method: str, point: Point) -> dict[int, float]:
        """Perplexity by seed at one length."""
        return {
            run.key.seed: run.perplexity[split, point.length]
            for run in self.of(data, method)
            if run.key.train_length == point.train_length
            and (split, point.length) in run.perplexity
        }

    def table_values(self, split: str) -> Callable[[str, str, Point], Mapping[int, float]]:
        def values(data: str, method: str, point: Point) -> Mapping[int, float]:
            return self.perplexity(split, data, method, point)

        return values

    def lengths(self, split: str, data: str, method: str) -> list[int]:
        found = {
            length
            for run in self.of(data, method)
            for (run_split, length) in run.perplexity
            if run_split == split
        }
        return sorted(found)

    def train_length(self, data: str) -> int | None:
        lengths = [run.key.train_length for run in self.runs if run.key.data == data]
        return min(lengths, default=None)

    def seconds_per_step(self, data: Iterable[str], method: str) -> dict[int, float]:
        wanted = set(data)
        return {
            run.key.seed: run.seconds_per_step
            for run in self.runs
            if run.key.data in wanted
            and run.key.method == method
            and run.seconds_per_step is not None
        }

    def positionwise(
        self, data: str, method: str, length: int, window: int | None, split: str
    ) -> list[Positionwise]:
        return [
            item
            for run in self.of(data, method)
            for item in run.positionwise
            if (item.length, item.window, item.split) == (length, window, split)
        ]

    @property
    def problems(self) -> list[str]:
        return [problem for run in self.runs for problem in run.problems]

    @property
    def any_results(self) -> bool:
        return any(run.perplexity or run.positionwise or run.losses for run in self.runs)
