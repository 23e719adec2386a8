"""Loss by position in the sequence: does a model use, or suffer from, what lies far behind it?"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch

from megatron.errors import EvaluationError
from megatron.evaluation.extrapolation import data_parameters, sequences_of, window_suffix
from megatron.evaluation.losses import perplexity, sequence_losses, windowed
from megatron.evaluation.results_schema import number, text_table
from megatron.evaluation.sequences import open_split
from megatron.evaluation.tasks import Context, EvaluationOptions, EvaluationTask, Split, task

__all__ = ["Positionwise", "bucket_edges"]

LINEAR_BUCKETS = 16


def bucket_edges(
    length: int, kind: Literal["log", "linear"] = "log", count: int | None = None
) -> list[int]:
    """Where buckets begin, and the end of the last: 0, 1, 2, 4, 8, ... or equal shares."""
    if kind == "linear":
        parts = min(count or LINEAR_BUCKETS, length)
        return [length * i // parts for i in range(parts + 1)]
    if count is not None:
        steps = [round(length ** (i / count)) for i in range(1, count + 1)]
        return [0, *sorted({min(step, length) for step in steps} | {length})]
    edges = [0, 1]
    while edges[-1] < length:
        edges.append(min(2 * edges[-1], length))
    return edges


@task("positionwise")
class Positionwise(EvaluationTask):
    """Loss at each position, and in buckets, at the longest of `eval_lengths` that can be done."""

    needs_data = True

    def file_name(self, options: EvaluationOptions) -> str:
        return f"{self.name}{window_suffix(options)}"

    def parameters(self, options: EvaluationOptions) -> dict[str, Any]:
        return {
            **data_parameters(options),
            "lengths": options.lengths,
            "buckets": [options.buckets, options.bucket_count],
        }

    def work(self, options: EvaluationOptions) -> list[tuple[int, int]]:
        return options.planned()

    def run(self, context: Context) -> dict[str, Any]:
        options = context.options
        results: dict[str, Any] = {}
        with windowed(context.model, options.window, context.model.spec.attention_window):
            for split in options.splits:
                for length in sorted(options.lengths, reverse=True):
                    entry = context.cells.attempt(
                        f"{split}/{length}",
                        partial(_measure, context, split, length),
                        split=split,
                        length=length,
                    )
                    if entry is not None:
                        results[split] = entry
                        break
        return results

    def table(self, results: dict[str, Any]) -> str:
        rows = [
            [
                split,
                f"{bucket['start']}-{bucket['end'] - 1}",
                number(bucket["loss"]),
                number(bucket["ppl"]),
                str(bucket["tokens"]),
            ]
            for split, entry in results.items()
            for bucket in entry["buckets"]
        ]
        return text_table(["split", "positions", "loss", "ppl", "tokens"], rows)


def _measure(context: Context, split: Split, length: int) -> dict[str, Any]:
    options = context.options
    sequences = sequences_of(options, open_split(options.data, split), length)
    losses = sequence_losses(
        context.model,
        sequences,
        ranks=context.ranks,
        batch_tokens=options.batch_tokens,
        label=f"positionwise {split} {length}",
    )
    by_position = torch.stack(losses).double().mean(0)
    if not bool(by_position.isfinite().all()):
        raise EvaluationError(f"{split} at {length}: the loss is not finite at some positions")
    edges = bucket_edges(length, options.buckets, options.bucket_count)
    buckets = []
    for start, end in pairwise(edges):
        loss = float(by_position[start:end].mean())
        buckets.append(
            {
                "start": start,
                "end": end,
                "loss": loss,
                "ppl": perplexity(loss),
                "tokens": (end - start) * len(sequences),
            }
        )
    return {
        "length": length,
        "buckets": buckets,
        "by_position": [round(float(loss), 4) for loss in by_position],
        "window": options.window,
        "sequences": len(sequences),
    }
