"""The tasks evaluate.py knows by name."""

from __future__ import annotations

import difflib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch

from megatron.errors import EvaluationError
from megatron.evaluation.results_schema import Cells
from megatron.mpu.job import Ranks

if TYPE_CHECKING:
    from megatron.model import GPTModel
    from megatron.neox_arguments import NeoXArgs
    from megatron.tokenizer import Tokenizer

__all__ = [
    "TASKS",
    "Context",
    "DataPlaces",
    "EvaluationOptions",
    "EvaluationTask",
    "WindowedTask",
    "imported_task",
    "nearest",
    "task",
]


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
class DataPlaces:
    """Where valid and test tokens come from."""

    data_path: str | None = None
    split: str = "949,50,1"
    valid_data_paths: tuple[str, ...] = ()
    test_data_paths: tuple[str, ...] = ()
    cache_dir: str | None = None

    def sources(self, split: Split) -> list[tuple[str, str]]:
        """Prefix and split string of each token file that serves this split."""
        own = self.valid_data_paths if split == "valid" else self.test_data_paths
        if own:
            everything = "0,1,0" if split == "valid" else "0,0,1"
            return [(prefix, everything) for prefix in own]
        return [(self.data_path, self.split)] if self.data_path else []


@dataclass(frozen=True)
class EvaluationOptions:
    """What to measure and on which data."""

    train_length: int
    lengths: tuple[int, ...]
    splits: tuple[Split, ...] = ("valid", "test")
    protocol: Literal["fixed_sequences", "fixed_tokens"] = "fixed_sequences"
    num_sequences: int = 16
    window: int | None = None
    stride: int | None = None
    context_length: int | None = None
    batch_tokens: int = DEFAULT_BATCH_TOKENS
    buckets: Literal["log", "linear"] = "log"
    bucket_count: int | None = None
    passkey_lengths: tuple[int, ...] = ()
    passkey_depths: int = 10
    passkey_samples: int = 10
    passkey_digits: int = 5
    ruler_tasks: tuple[str, ...] = ()
    ruler_lengths: tuple[int, ...] = ()
    ruler_samples: int = 20
    longppl_short_context: int | None = None
    longppl_evaluator: str | None = None
    recall_samples: int = 64
    num_fewshot: int | None = None
    limit: float | None = None
    include_path: str | None = None
    char_level_ppl: bool = False
    seed: int = 1234
    data_seed: int = 1234
    data: DataPlaces = field(default_factory=DataPlaces)

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
        flat = args.to_dict()
        train_length = flat["seq_length"]
        lengths = tuple(flat.get("eval_lengths") or [train_length * n for n in LENGTH_FACTORS])
        seed = flat["seed"]
        return cls(
            train_length=train_length,
            lengths=tuple(sorted(set(lengths))),
            splits=_splits(flat),
            passkey_lengths=tuple(sorted(set(flat.get("passkey_lengths") or lengths))),
            ruler_lengths=tuple(sorted(set(flat.get("ruler_lengths") or lengths))),
            ruler_tasks=tuple(flat.get("ruler_tasks") or ()),
            seed=seed,
            data_seed=flat.get("data_seed", seed),
            data=DataPlaces(
                data_path=flat.get("data_path"),
                split=flat["split"],
                valid_data_paths=tuple(flat.get("valid_data_paths") or ()),
                test_data_paths=tuple(flat.get("test_data_paths") or ()),
                cache_dir=flat.get("data_cache_dir"),
            ),
            **{name: flat[key] for name, key in _PLAIN_KEYS.items() if flat.get(key) is not None},
        )


_PLAIN_KEYS = {
    "protocol": "eval_protocol",
    "num_sequences": "eval_num_sequences",
    "window": "eval_window",
    "stride": "eval_stride",
    "context_length": "eval_context_length",
    "batch_tokens": "eval_batch_tokens",
    "buckets": "positionwise_buckets",
    "bucket_count": "positionwise_bucket_count",
    "passkey_depths": "passkey_depths",
    "passkey_samples": "passkey_samples",
    "passkey_digits": "passkey_digits",
    "ruler_samples": "ruler_samples",
    "longppl_short_context": "longppl_short_context",
    "longppl_evaluator": "longppl_evaluator",
    "recall_samples": "recall_samples",
    "num_fewshot": "num_fewshot",
    "limit": "eval_limit",
    "include_path": "eval_include_path",
    "char_level_ppl": "char_level_ppl",
}
"""Fields above whose default is the config's own."""


def _splits(flat: Mapping[str, Any]) -> tuple[Split, ...]:
    """Both splits, unless do_valid or do_test says no."""
    wanted: list[Split] = []
    if flat.get("do_valid") is not False:
        wanted.append("valid")
    if flat.get("do_test") is not False:
        wanted.append("test")
    return tuple(wanted)
