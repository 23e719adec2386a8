"""Sliding-window perplexity: every token predicted once, with as much context as the window has.

    length 4, stride 2        tokens   0 1 2 3 4 5 6 7
                              window   [s s s s]
                                           [. . s s]
                                               [. . s s]      s: scored, .: context only

The same tokens are scored at every length, so that lengths can be compared.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from megatron.errors import EvaluationError
from megatron.evaluation.extrapolation import data_parameters, measure_lengths, window_suffix
from megatron.evaluation.losses import mean_and_error, sequence_losses
from megatron.evaluation.results_schema import number, text_table
from megatron.evaluation.sequences import open_split
from megatron.evaluation.tasks import Context, EvaluationOptions, EvaluationTask, Split, task

__all__ = ["Sliding", "SlidingWindows", "window_starts"]


def window_starts(total: int, length: int, stride: int) -> list[tuple[int, int]]:
    """(start of the window, how many of its last tokens are scored) for `total` predictions."""
    windows = [(0, length)]
    scored = length
    while scored < total:
        new = min(stride, total - scored)
        scored += new
        windows.append((scored - length, new))
    return windows


class SlidingWindows:
    """Windows of `length` + 1 tokens over one stretch of tokens."""

    def __init__(self, tokens: Tensor, length: int, starts: list[int]) -> None:
        self.tokens, self.length, self.starts = tokens, length, starts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: int) -> Tensor:
        start = self.starts[number]
        return self.tokens[start : start + self.length + 1]


@task("sliding")
class Sliding(EvaluationTask):
    """Perplexity with windows of each length, `eval_stride` new tokens a window."""

    needs_data = True

    def file_name(self, options: EvaluationOptions) -> str:
        return f"{self.name}{window_suffix(options)}"

    def parameters(self, options: EvaluationOptions) -> dict[str, Any]:
        return {
            **data_parameters(options),
            "lengths": options.lengths,
            "stride": options.stride,
            "train_length": options.train_length,
        }

    def work(self, options: EvaluationOptions) -> list[tuple[int, int]]:
        wanted = max(options.num_sequences * options.train_length, *options.lengths)
        return [
            (wanted * length // min(length, options.stride or max(1, length // 2)), length)
            for _ in options.splits
            for length in options.lengths
        ]

    def run(self, context: Context) -> dict[str, Any]:
        return measure_lengths(context, partial(_measure, context))

    def table(self, results: dict[str, Any]) -> str:
        rows = [
            [
                split,
                str(entry["length"]),
                str(entry["stride"]),
                number(entry["loss"]),
                number(entry["ppl"]),
                number(entry["stderr"]),
                str(entry["tokens"]),
            ]
            for split, entries in results.items()
            for entry in entries
        ]
        return text_table(["split", "length", "stride", "loss", "ppl", "stderr", "tokens"], rows)


def _measure(context: Context, split: Split, length: int) -> dict[str, Any]:
    options = context.options
    stride = options.stride or max(1, length // 2)
    if stride > length:
        raise EvaluationError(
            f"eval_stride = {stride} is longer than the window of {length}: tokens would be left "
            "out; use a stride of at most the length"
        )
    file = open_split(options.data, split)[0]
    wanted = max(options.num_sequences * options.train_length, *options.lengths)
    total = min(file.predictable, wanted)
    if total < length:
        raise EvaluationError(
            f"the {split} split of {file.prefix} holds {total} tokens to predict, fewer than a "
            f"window of {length}; use shorter eval_lengths or more data"
        )
    windows = window_starts(total, length, stride)
    losses = sequence_losses(
        context.model,
        SlidingWindows(file.stretch(total), length, [start for start, _ in windows]),
        ranks=context.ranks,
        batch_tokens=options.batch_tokens,
        label=f"sliding {split} {length}",
    )
    scored = [loss[-new:] for loss, (_, new) in zip(losses, windows, strict=True)]
    summary = mean_and_error(scored)
    summary["windows"] = summary.pop("sequences")
    return {"length": length, "stride": stride, **summary}
