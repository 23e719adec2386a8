"""The tasks evaluate.py knows by name."""

from __future__ import annotations

import difflib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch

from megatron.errors import EvaluationError
from megatron.evaluation.results_schema import Cells
from megatron.mpu.job import Ranks

if TYPE_CHECKING:
    from megatron.model import GPTModel
    from megatron.neox_arguments import NeoXArgs
    from megatron.neox_arguments.run_keys import DataArgs, EvaluationArgs
    from megatron.tokenizer import Tokenizer


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


class EvaluationTask(ABC):
    """One kind of measurement."""

    name: ClassVar[str] = ""

    def file_name(self, options: EvaluationOptions) -> str:
        """Last part of the result's file name."""
        return self.name

    def result_name(self, options: EvaluationOptions) -> str:
        """The `task` of the result file."""
        return self.name

    @abstractmethod
    def parameters(self, options: EvaluationOptions) -> dict[str, Any]:
        """The options on which the result depends."""

    def work(self, options: EvaluationOptions) -> list[tuple[int, int]]:
        """(tokens, length) of all that will be computed, for the bar; empty if nobody knows."""
        return []

    @abstractmethod
    def run(self, context: Context) -> dict[str, Any]:
        """What was measured; parts that cannot be are noted in `context.cells.errors`."""

    @abstractmethod
    def table(self, results: dict[str, Any]) -> str:
        """The result for people."""


class WindowedTask(EvaluationTask):
    """A measurement under `eval_window`, which has a result file of its own."""

    def file_name(self, options: EvaluationOptions) -> str:
        return f"{self.name}_window{options.window}" if options.window else self.name

    def run(self, context: Context) -> dict[str, Any]:
        model, window = context.model, context.options.window
        if window is None:
            return self.measure(context)
        model.set_window(window)
        try:
            return self.measure(context)
        finally:
            model.set_window(model.spec.attention_window)

    @abstractmethod
    def measure(self, context: Context) -> dict[str, Any]:
        """What `run` returns."""


TASKS: dict[str, EvaluationTask] = {}
Cls = TypeVar("Cls", bound=type[EvaluationTask])


def task(name: str) -> Callable[[Cls], Cls]:
    """Make a class available as `--eval_tasks NAME`."""

    def decorate(cls: Cls) -> Cls:
        cls.name = name
        TASKS[name] = cls()
        return cls

    return decorate


def imported_task(reference: str) -> EvaluationTask:
    """A task of the user's own: `package.module:Class`, a class derived from EvaluationTask."""
    module_name, _, class_name = reference.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise EvaluationError(
            f"cannot be imported ({error}); check that the module is in this folder or on "
            "PYTHONPATH and defines the class"
        ) from error
    if not (isinstance(found, type) and issubclass(found, EvaluationTask)):
        raise EvaluationError("is not an evaluation task; derive the class from EvaluationTask")
    if not found.name:
        found.name = class_name
    try:
        return found()
    except TypeError as error:  # a method is missing: abc says which
        raise EvaluationError(str(error)) from error


def nearest(name: str, candidates: Iterable[str]) -> list[str]:
    """Names like this one."""
    return difflib.get_close_matches(name, list(candidates), n=3, cutoff=0.5)


# The part of a config that evaluation needs, with its defaults filled in.

Split = Literal["valid", "test"]
LENGTH_FACTORS = (1, 2, 4, 8, 16, 32)
DEFAULT_BATCH_TOKENS = 16_384


@dataclass(frozen=True)
class EvaluationOptions:
    """What to measure and on which data."""

    train_length: int
    lengths: tuple[int, ...]
    splits: tuple[Split, ...]
    protocol: Literal["fixed_sequences", "fixed_tokens"]
    num_sequences: int
    window: int | None
    stride: int | None
    context_length: int | None
    batch_tokens: int
    buckets: Literal["log", "linear"]
    bucket_count: int | None
    passkey_lengths: tuple[int, ...]
    passkey_depths: int
    passkey_samples: int
    passkey_digits: int
    ruler_tasks: tuple[str, ...]
    ruler_lengths: tuple[int, ...]
    ruler_samples: int
    longppl_short_context: int | None
    longppl_evaluator: str | None
    recall_samples: int
    num_fewshot: int | None
    limit: float | None
    include_path: str | None
    char_level_ppl: bool
    seed: int
    data_seed: int
    data: DataArgs

    def planned(self) -> list[tuple[int, int]]:
        """(tokens, length) of a task that goes over every split at every length once."""
        longest = max(self.lengths)
        same_tokens = self.protocol == "fixed_tokens"
        return [
            (self.num_sequences * (longest if same_tokens else length), length)
            for _ in self.splits
            for length in self.lengths
        ]

    @classmethod
    def from_args(cls, args: NeoXArgs) -> EvaluationOptions:
        """The options of a config; `eval_lengths` defaults to 1x..32x the training length."""
        own, seed, train_length = args.evaluation, args.runtime.seed, args.model.seq_length
        lengths = own.eval_lengths or [train_length * n for n in LENGTH_FACTORS]
        keys = {item.name: _OTHER_NAMES.get(item.name, item.name) for item in fields(cls)}
        plain = {name: getattr(own, key) for name, key in keys.items() if hasattr(own, key)}
        filled = {
            "train_length": train_length,
            "lengths": tuple(sorted(set(lengths))),
            "splits": _splits(own),
            "batch_tokens": own.eval_batch_tokens or DEFAULT_BATCH_TOKENS,
            "buckets": own.positionwise_buckets or "log",
            "passkey_lengths": tuple(sorted(set(own.passkey_lengths or lengths))),
            "ruler_lengths": tuple(sorted(set(own.ruler_lengths or lengths))),
            "ruler_tasks": tuple(own.ruler_tasks or ()),
            "seed": seed,
            "data_seed": seed if args.data.data_seed is None else args.data.data_seed,
            "data": args.data,
        }
        return cls(**{**plain, **filled})


_OTHER_NAMES = {
    "protocol": "eval_protocol",
    "num_sequences": "eval_num_sequences",
    "window": "eval_window",
    "stride": "eval_stride",
    "context_length": "eval_context_length",
    "bucket_count": "positionwise_bucket_count",
    "limit": "eval_limit",
    "include_path": "eval_include_path",
}
"""Fields above -> their keys in the config, where those are longer."""


def _splits(evaluation: EvaluationArgs) -> tuple[Split, ...]:
    """Both splits, unless do_valid or do_test says no."""
    wanted: dict[Split, bool | None] = {"valid": evaluation.do_valid, "test": evaluation.do_test}
    return tuple(split for split, said in wanted.items() if said is not False)
