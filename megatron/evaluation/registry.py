"""The tasks evaluate.py knows by name."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from megatron.evaluation.options import EvaluationOptions
from megatron.evaluation.ranks import Ranks
from megatron.evaluation.results import Cells

if TYPE_CHECKING:
    from megatron.model import GPTModel
    from megatron.tokenizer import Tokenizer

__all__ = ["TASKS", "Context", "EvaluationTask", "nearest", "task"]


@dataclass(frozen=True)
class Context:
    """Everything a task may use."""

    model: GPTModel
    options: EvaluationOptions
    cells: Cells
    ranks: Ranks
    tokenizer: Callable[[], Tokenizer]
    say: Callable[[str], None]
    request_cache: Path
    """Where answers to single requests may be kept, by checkpoint."""

    @property
    def device(self) -> torch.device:
        return self.model.device

    def on_device(self, tokens: Tensor) -> Tensor:
        return tokens.to(self.model.device)


class EvaluationTask(ABC):
    """One kind of measurement."""

    name: ClassVar[str] = ""
    needs_data: ClassVar[bool] = False

    def file_name(self, options: EvaluationOptions) -> str:
        """Last part of the result's file name."""
        return self.name

    def result_name(self, options: EvaluationOptions) -> str:
        """The `task` of the result file."""
        return self.name

    @abstractmethod
    def parameters(self, options: EvaluationOptions) -> dict[str, Any]:
        """The options on which the result depends."""

    @abstractmethod
    def run(self, context: Context) -> dict[str, Any]:
        """What was measured; parts that cannot be are noted in `context.cells.errors`."""

    @abstractmethod
    def table(self, results: dict[str, Any]) -> str:
        """The result for people."""


TASKS: dict[str, EvaluationTask] = {}
Cls = TypeVar("Cls", bound=type[EvaluationTask])


def task(name: str) -> Callable[[Cls], Cls]:
    """Make a class available as `--eval_tasks NAME`."""

    def decorate(cls: Cls) -> Cls:
        cls.name = name
        TASKS[name] = cls()
        return cls

    return decorate


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """Names like this one."""
    return difflib.get_close_matches(name, list(candidates), n=count, cutoff=0.5)
