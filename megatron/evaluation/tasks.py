"""The interface of evaluation tasks, their options, their context and their views."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from megatron.evaluation.losses import TotalBar
from megatron.evaluation.results_schema import Cells, Content, recorded_settings
from megatron.mpu.job import Ranks
from megatron.neox_arguments.run_keys import DataArgs, EvaluationArgs

if TYPE_CHECKING:
    from megatron.model import GPTModel
    from megatron.neox_arguments import NeoXArgs
    from megatron.tokenizer import Tokenizer

Split = Literal["valid", "test"]
Item = TypeVar("Item")
Answer = TypeVar("Answer")
LENGTH_FACTORS = (1, 2, 4, 8, 16, 32)
DEFAULT_BATCH_TOKENS = 16_384


class EvaluationOptions(EvaluationArgs):
    """The evaluation keys of a config with null ones filled in, and what else a task depends on."""

    eval_lengths: list[int]
    eval_context_length: int
    eval_batch_tokens: int
    positionwise_buckets: Literal["log", "linear"]
    passkey_lengths: list[int]
    ruler_lengths: list[int]
    longppl_short_context: int
    train_length: int
    seed: int
    data_seed: int
    data: DataArgs

    @classmethod
    def from_args(cls, args: NeoXArgs) -> EvaluationOptions:
        """The options of a config; `eval_lengths` defaults to 1x..32x the training length."""
        own, seed, train_length = args.evaluation, args.runtime.seed, args.model.seq_length
        lengths = own.eval_lengths or [train_length * n for n in LENGTH_FACTORS]
        filled = {
            "eval_lengths": sorted(set(lengths)),
            "eval_context_length": own.eval_context_length or train_length,
            "eval_batch_tokens": own.eval_batch_tokens or DEFAULT_BATCH_TOKENS,
            "positionwise_buckets": own.positionwise_buckets or "log",
            "passkey_lengths": sorted(set(own.passkey_lengths or lengths)),
            "ruler_lengths": sorted(set(own.ruler_lengths or lengths)),
            "longppl_short_context": own.longppl_short_context or train_length,
            "train_length": train_length,
            "seed": seed,
            "data_seed": seed if args.data.data_seed is None else args.data.data_seed,
            "data": args.data,
        }
        return cls(**{**dict(own), **filled})

    @property
    def splits(self) -> list[Split]:
        """Both splits, unless do_valid or do_test is false."""
        wanted: dict[Split, bool | None] = {"valid": self.do_valid, "test": self.do_test}
        return [split for split, flag in wanted.items() if flag is not False]


@dataclass(frozen=True)
class Context:
    """Everything a task may use."""

    model: GPTModel
    options: EvaluationOptions
    cells: Cells
    ranks: Ranks
    tokenizer: Callable[[], Tokenizer]
    say: Callable[[str], None]
    bar: TotalBar
    request_cache: Path
    """Where answers to single requests may be kept, by checkpoint."""

    def in_batches(
        self,
        function: Callable[[Sequence[Item]], Iterable[Answer]],
        items: Sequence[Item],
        length: int,
        label: str,
    ) -> list[Answer]:
        """`function` on as many items of `length` tokens as fit into a batch, shared by ranks."""
        rows = max(1, self.options.eval_batch_tokens // length)

        def share(own: Sequence[Item]) -> list[Answer]:
            answers: list[Answer] = []
            self.bar.at(label)
            for start in range(0, len(own), rows):
                group = own[start : start + rows]
                answers.extend(function(group))
                self.bar.advance(len(group) * length * self.ranks.size, length)
            return answers

        return self.ranks.map(share, items)


# What a task shows in a report, as data: a task lists its views, the report draws them.
#
# A cell is one number (or record) of a result, found by its place: a group and a length. The group
# is a split, a kind of text, or whatever the task tells apart; a panel and a table block show one.

Place = tuple[str, int]
"""(group, length)"""


@dataclass(frozen=True)
class View:
    """A figure, with or without a table."""

    key: str
    """End of the names of its files."""
    title: str
    """Of the figure; `{split}` is replaced by the split that is drawn."""
    caption: str


@dataclass(frozen=True)
class GroupView(View):
    """One number by group and length: a panel and a table block for each group."""

    groups: Mapping[str, str]
    """Group -> title, in the order in which they are shown."""
    ylabel: str
    table_caption: str = ""
    """Empty: a figure without a table."""
    xlabel: str = "length (tokens)"
    row_head: str = "Length"
    scale: float = 1.0
    """Multiplied with every number: 100 for percent."""
    limits: tuple[float, float] | None = None
    """Of the vertical axis; None follows the numbers."""


@dataclass(frozen=True)
class SplitView(View):
    """Perplexity by split and length: the table that a suite's `table:` lays out, and its curves.

    Such cells are what the paper's tables, claims and contrasts compare.
    """


@dataclass(frozen=True)
class PositionView(View):
    """Loss by position of long sequences, with and without a window."""


class EvaluationTask(ABC):
    """One kind of measurement: its parameters, settings, cells, table and figures.

    A subclass needs `parameters`, `run` and `table`. To appear in the report of a suite it also
    needs `cells`, `wanted` and `views`; nothing outside the class has to know its name.
    """

    name: ClassVar[str] = ""
    views: ClassVar[tuple[View, ...]] = ()
    """What a report shows of the results."""
    needs_longest: ClassVar[bool] = False
    """Whether what is measured at one length depends on the longest of them."""

    def file_name(self, options: EvaluationOptions) -> str:
        """Last part of the result's file name."""
        return self.name

    def result_name(self, options: EvaluationOptions) -> str:
        """The `task` of the result file."""
        return self.name

    @abstractmethod
    def parameters(self, options: EvaluationOptions) -> dict[str, Any]:
        """The options on which the result depends; an option added later only where it is set."""

    def work(self, options: EvaluationOptions) -> list[tuple[int, int]]:
        """(tokens, length) of all that will be computed, for the progress bar; empty: unknown."""
        return []

    @abstractmethod
    def run(self, context: Context) -> dict[str, Any]:
        """What was measured; parts that cannot be are noted in `context.cells.errors`."""

    @abstractmethod
    def table(self, results: dict[str, Any]) -> str:
        """The result as text for the terminal."""

    def cells(self, results: dict[str, Any]) -> Mapping[Place, Any]:
        """The numbers of a result file, for tables and figures over runs."""
        return {}

    def wanted(self, options: EvaluationOptions, splits: Sequence[str]) -> list[Place]:
        """The cells of a complete result, as far as a report on these splits needs them."""
        return []

    def comparable(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The recorded settings in which two results must agree to stand in one table.

        Folders of data may differ, and so may `lengths`, as long as cells of one length do not
        depend on the other lengths.
        """
        facts = {key: settings[key] for key in settings if key not in ("data", "lengths", "model")}
        data = settings.get("data")
        if data is not None:
            facts["data"] = ", ".join(sorted({Path(item["prefix"]).name for item in data}))
            facts["split"] = ", ".join(sorted({str(item.get("share")) for item in data}))
        if self.needs_longest or settings.get("protocol") == "fixed_tokens":
            facts["longest length"] = max(settings.get("lengths") or [0])
        return {**facts, "model settings": settings.get("model") or {}}

    def comparable_in_old_file(self, results: dict[str, Any]) -> dict[str, Any]:
        """What a file of format 1, which recorded no settings, still tells about them."""
        return {}


def requested(
    task: EvaluationTask, options: EvaluationOptions, model: Mapping[str, Any]
) -> Content:
    """What a result records of the config that asked for it; `model` are the model's keys.

    evaluate.py writes this, and a suite expects this.
    """
    parameters = task.parameters(options)
    if options.inference_dtype is not None:
        parameters = {**parameters, "inference_dtype": options.inference_dtype}
    return {
        "task": task.result_name(options),
        "seed": options.seed,
        "data_seed": options.data_seed,
        "protocol": options.eval_protocol,
        "train_length": options.train_length,
        "window": options.eval_window,
        "settings": recorded_settings(parameters, model),
    }


class WindowedTask(EvaluationTask):
    """A measurement under `eval_window`, which has a result file of its own."""

    def file_name(self, options: EvaluationOptions) -> str:
        window = options.eval_window
        return f"{self.name}_window{window}" if window else self.name

    def run(self, context: Context) -> dict[str, Any]:
        model = context.model
        try:
            model.set_window(context.options.eval_window)
            return self.measure(context)
        finally:
            model.set_window(None)

    @abstractmethod
    def measure(self, context: Context) -> dict[str, Any]:
        """What `run` returns."""


class GridTask(WindowedTask):
    """A measurement of each kind of text at each of `eval_lengths`."""

    kinds: ClassVar[Sequence[str]]

    def wanted(self, options: EvaluationOptions, splits: Sequence[str]) -> list[Place]:
        return list(product(self.kinds, options.eval_lengths))

    def measure(self, context: Context) -> dict[str, Any]:
        lengths = context.options.eval_lengths
        grid = context.cells.grid(partial(self.entry, context), kind=self.kinds, length=lengths)
        return {"grid": list(grid)}

    @abstractmethod
    def entry(self, context: Context, kind: str, length: int) -> dict[str, Any]:
        """What one kind gives at one length."""


TASKS: dict[str, EvaluationTask] = {}
Cls = TypeVar("Cls", bound=type[EvaluationTask])


def task(name: str) -> Callable[[Cls], Cls]:
    """Make a class available as `--eval_tasks NAME`."""

    def decorate(cls: Cls) -> Cls:
        cls.name = name
        TASKS[name] = cls()
        return cls

    return decorate
