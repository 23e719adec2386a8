"""Perplexity by length, and with sliding windows."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron.errors import EvaluationError
from megatron.evaluation.losses import mean_and_error, perplexity, sequence_losses, stream_losses
from megatron.evaluation.results_schema import OpenModel
from megatron.evaluation.sequences import (
    SequenceSet,
    SplitTokens,
    fixed_sequences,
    fixed_tokens,
    open_split,
    token_files,
)
from megatron.evaluation.tasks import (
    Context,
    EvaluationOptions,
    Place,
    Split,
    SplitView,
    WindowedTask,
    task,
)
from megatron.evaluation.text_tables import text_table
from megatron.tokenizer.base import count_words


class Measured(OpenModel):
    """The length and the number of sequences of an entry."""

    length: int
    sequences: int = 0


class LengthEntry(Measured):
    """Loss and perplexity at one length."""

    loss: float | None = None
    ppl: float | None = None


def longest(entries: Sequence[Measured]) -> dict[str, int]:
    """The longest length and its number of sequences; a small split had fewer than asked for."""
    length, sequences = max(((each.length, each.sequences) for each in entries), default=(0, 0))
    return {"num_sequences": sequences, "longest length": length}


class TaskByLength(WindowedTask):
    """A measurement of each split at each of `eval_lengths`."""

    def parameters(self, options: EvaluationOptions) -> dict[str, Any]:
        return {**_data_parameters(options), "lengths": options.eval_lengths}

    def work(self, options: EvaluationOptions) -> list[tuple[int, int]]:
        same_tokens = options.eval_protocol == "fixed_tokens"
        longest = max(options.eval_lengths)
        return [
            (options.eval_num_sequences * (longest if same_tokens else length), length)
            for _ in options.splits
            for length in options.eval_lengths
        ]

    def wanted(self, options: EvaluationOptions, splits: Sequence[str]) -> list[Place]:
        return list(product(splits, options.eval_lengths))

    def measure(self, context: Context) -> dict[str, Any]:
        options = context.options
        return {
            split: list(self.entries(context, split, options.eval_lengths))
            for split in options.splits
        }

    def entries(
        self, context: Context, split: Split, lengths: Sequence[int]
    ) -> Iterator[dict[str, Any]]:
        """What can be measured at these lengths; the files are opened once."""
        files = cache(partial(open_split, context.options.data))
        return context.cells.grid(
            lambda split, length: self.entry(context, files(split), length),
            split=[split],
            length=lengths,
        )

    @abstractmethod
    def entry(self, context: Context, files: list[SplitTokens], length: int) -> dict[str, Any]:
        """What one split gives at one length."""

    def losses(self, context: Context, texts: SequenceSet, split: Split) -> list[Tensor]:
        """The loss of every token of the texts."""
        return sequence_losses(context, texts, f"{self.name} {split} {texts.length}")


def _data_parameters(options: EvaluationOptions) -> dict[str, Any]:
    """The data that perplexities are measured on, files included."""
    files = []
    for split in options.splits:
        for prefix, share in token_files(options.data, split):
            files.append([split, prefix, share, _file_state(prefix)])
    return {
        "files": files,
        "protocol": options.eval_protocol,
        "num_sequences": options.eval_num_sequences,
        "data_seed": options.data_seed,
        "window": options.eval_window,
    }


def _file_state(prefix: str) -> list[int]:
    """Size and modification time of a token file, which change with its content."""
    states = []
    for suffix in (".bin", ".idx"):
        path = Path(prefix + suffix)
        if path.exists():
            states += [path.stat().st_size, path.stat().st_mtime_ns]
    return states


def sequences_of(options: EvaluationOptions, files: list[SplitTokens], length: int) -> SequenceSet:
    """The sequences of one length under the chosen protocol."""
    count = options.eval_num_sequences
    if options.eval_protocol == "fixed_tokens":
        return fixed_tokens(files, length, options.eval_lengths, count)
    seed, cache_dir = options.data_seed, options.data.data_cache_dir
    return fixed_sequences(files, length, count, seed=seed, cache_dir=cache_dir)


def table_by_length(results: dict[str, Any], *columns: str) -> str:
    """A row for each split and length."""
    rows = [
        [split, *(entry[column] for column in columns)]
        for split, entries in results.items()
        for entry in entries
    ]
    return text_table(["split", *(column.replace("_", " ") for column in columns)], rows)


@task("extrapolation")
class Extrapolation(TaskByLength):
    """Loss and perplexity at each length, on sequences that do not overlap."""

    views = (
        SplitView(
            "perplexity",
            "Perplexity against length ({split})",
            "Mean over seeds, shaded by one standard deviation; logarithmic axes. The dotted line "
            "marks the training length. The lower row, where there is one, zooms in "
            "on the methods that do not explode (linear axis).",
        ),
    )

    def file_name(self, options: EvaluationOptions) -> str:
        last = f"_last{options.eval_last}" if options.eval_last else ""
        return super().file_name(options) + last

    def result_name(self, options: EvaluationOptions) -> str:
        # Readers of `extrapolation` results must not take windowed numbers, or those of the last
        # tokens alone, for the model's own.
        windowed = "_windowed" if options.eval_window else ""
        return self.name + windowed + ("_last" if options.eval_last else "")

    def parameters(self, options: EvaluationOptions) -> dict[str, Any]:
        last = {"last": options.eval_last} if options.eval_last else {}
        return {**super().parameters(options), "char_level_ppl": options.char_level_ppl, **last}

    def comparable(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        # Perplexity by character is an addition: the perplexity by token is the same.
        return super().comparable({**settings, "char_level_ppl": None})

    def comparable_in_old_file(self, results: dict[str, Any]) -> dict[str, Any]:
        found = [entry for entries in _by_split(results).values() for entry in entries]
        return longest(found)

    def cells(self, results: dict[str, Any]) -> Mapping[Place, float | None]:
        return {
            (split, entry.length): _perplexity_of(entry)
            for split, entries in _by_split(results).items()
            for entry in entries
        }

    def entry(self, context: Context, files: list[SplitTokens], length: int) -> dict[str, Any]:
        options, split, last = context.options, files[0].which, context.options.eval_last
        if last and last > length:
            raise EvaluationError(
                f"eval_last = {last} is more than the sequence has; use longer eval_lengths"
            )
        sequences = sequences_of(options, files, length)
        wanted = options.eval_num_sequences
        if options.eval_protocol == "fixed_sequences" and len(sequences) < wanted:
            context.say(
                f"{split} at {length}: the split holds {len(sequences)} sequences of this length, "
                f"not {wanted} (eval_num_sequences); all of them are used"
            )
        losses = [loss[-(last or length) :] for loss in self.losses(context, sequences, split)]
        entry: dict[str, Any] = {"length": length, **mean_and_error(losses)}
        if options.char_level_ppl:
            entry |= _per_character(context, sequences, entry)
        return entry

    def table(self, results: dict[str, Any]) -> str:
        return table_by_length(results, "length", "loss", "ppl", "stderr", "sequences", "tokens")


def _by_split(results: Mapping[str, Any]) -> dict[str, list[LengthEntry]]:
    return {
        split: [LengthEntry.model_validate(entry) for entry in entries]
        for split, entries in results.items()
    }


def _perplexity_of(entry: LengthEntry) -> float | None:
    if entry.ppl is not None or entry.loss is None:
        return entry.ppl
    try:
        return math.exp(entry.loss)
    except OverflowError:
        return math.inf


def _per_character(
    context: Context, sequences: SequenceSet, entry: dict[str, Any]
) -> dict[str, Any]:
    """The same loss shared out over characters and words, which makes tokenizers comparable."""
    tokenizer, scored = context.tokenizer(), context.options.eval_last or sequences.length
    texts = [tokenizer.detokenize(sequences[i][-scored:].tolist()) for i in range(len(sequences))]
    characters, words = sum(map(len, texts)), sum(map(count_words, texts))
    total = entry["loss"] * entry["tokens"]
    return {
        "characters": characters,
        "char_ppl": perplexity(total / characters),
        "words": words,
        "word_ppl": perplexity(total / words) if words else None,
    }


def window_starts(total: int, length: int, stride: int) -> list[tuple[int, int]]:
    """(start of the window, how many of its last tokens are scored) for `total` predictions."""
    windows = [(0, length)]
    scored = length
    while scored < total:
        new = min(stride, total - scored)
        scored += new
        windows.append((scored - length, new))
    return windows


@task("sliding")
class Sliding(TaskByLength):
    """Every token predicted once, with as much context as the window has.

        length 4, stride 2        tokens   0 1 2 3 4 5 6 7
                                  window   [s s s s]
                                               [. . s s]
                                                   [. . s s]      s: scored, .: context only

    The same tokens are scored at every length, so that lengths can be compared. Where attention
    windows reach less far back, through all layers, than the context of every scored token, a file
    is read once with a cache: the numbers are the same.
    """

    needs_longest: ClassVar[bool] = True

    def parameters(self, options: EvaluationOptions) -> dict[str, Any]:
        own: dict[str, Any] = {
            "stride": options.eval_stride,
            "train_length": options.train_length,
        }
        if any(len(token_files(options.data, split)) > 1 for split in options.splits):
            own["files_scored"] = "all"  # once it was the first one
        return {**super().parameters(options), **own}

    def work(self, options: EvaluationOptions) -> list[tuple[int, int]]:
        files = {split: len(token_files(options.data, split)) for split in options.splits}
        return [
            (count * _wanted(options, count) * length // _stride(options, length), length)
            for count in files.values()
            for length in options.eval_lengths
        ]

    def entry(self, context: Context, files: list[SplitTokens], length: int) -> dict[str, Any]:
        split, stride = files[0].which, _stride(context.options, length)
        if stride > length:
            raise EvaluationError(
                f"eval_stride = {stride} is longer than the window of {length}: tokens would be "
                "left out; use a stride of at most the length"
            )
        longest = max(context.options.eval_lengths)
        usable = [file for file in files if file.predictable >= longest]
        usable = usable or [max(files, key=lambda file: file.predictable)]
        readers, scored_tokens, totals = [], [], []
        for file in usable:
            total = min(file.predictable, _wanted(context.options, len(usable)))
            if total < length:
                raise EvaluationError(
                    f"the {split} split of {file.prefix} holds {total} tokens to predict, fewer "
                    f"than a window of {length}; use shorter eval_lengths or more data"
                )
            totals.append(total)
            for start, new in window_starts(total, length, stride):
                readers.append(partial(file.read, start, length + 1))
                scored_tokens.append(new)
        seen = context.model.context_seen()
        if seen is not None and stride < length and seen <= length - stride:
            whole = self._streamed(context, usable, totals, split)
            scored = list(torch.cat(whole).split(scored_tokens))
        else:
            losses = self.losses(context, SequenceSet(length, readers), split)
            scored = [loss[-new:] for loss, new in zip(losses, scored_tokens, strict=True)]
        summary = mean_and_error(scored)
        summary["windows"] = summary.pop("sequences")
        return {"length": length, "stride": stride, **summary}

    def _streamed(
        self, context: Context, files: Sequence[SplitTokens], totals: Sequence[int], split: Split
    ) -> list[Tensor]:
        """The losses of each file's tokens, of which no window is read twice."""

        def losses(numbers: Sequence[int]) -> list[Tensor]:
            texts = [torch.from_numpy(files[i].read(0, totals[i] + 1)) for i in numbers]
            chunk = context.options.eval_batch_tokens
            return [stream_losses(context.model, text, chunk) for text in texts]

        return context.in_batches(losses, range(len(files)), max(totals), f"{self.name} {split}")

    def table(self, results: dict[str, Any]) -> str:
        return table_by_length(results, "length", "stride", "loss", "ppl", "stderr", "tokens")


def _stride(options: EvaluationOptions, length: int) -> int:
    return options.eval_stride or max(1, length // 2)


def _wanted(options: EvaluationOptions, files: int) -> int:
    """Tokens to predict in each of so many files."""
    tokens = options.eval_num_sequences * options.train_length
    return max(math.ceil(tokens / max(files, 1)), *options.eval_lengths)
