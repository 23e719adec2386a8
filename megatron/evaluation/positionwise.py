"""Loss by position in long sequences: does a long context help or hurt the model?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from megatron.errors import EvaluationError
from megatron.evaluation.losses import perplexity
from megatron.evaluation.perplexity import Measured, TaskByLength, longest, sequences_of
from megatron.evaluation.results_schema import OpenModel
from megatron.evaluation.sequences import SplitTokens
from megatron.evaluation.tasks import Context, EvaluationOptions, Place, PositionView, task
from megatron.evaluation.text_tables import text_table

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


class Bucket(OpenModel):
    """The mean loss of the positions from `start` up to, but not including, `end`."""

    start: int
    end: int
    loss: float


class PositionEntry(Measured):
    """What `positionwise` records of one split."""

    buckets: list[Bucket]
    by_position: tuple[float, ...] = ()
    """Absent in files of older versions."""
    window: int | None = None


@task("positionwise")
class Positionwise(TaskByLength):
    """Loss at each position, and in buckets, at the longest of `eval_lengths` that can be done."""

    needs_longest: ClassVar[bool] = True
    views = (
        PositionView(
            "positionwise",
            "Position-wise perplexity",
            "Perplexity of the tokens at each position of long sequences: mean loss over seeds in "
            "64 equal bins (thin) and their running mean over five (thick), shaded by its standard "
            "error over seeds. If a model used no more than the window, its line would coincide "
            "with the dashed windowed line beyond it.",
        ),
    )

    def parameters(self, options: EvaluationOptions) -> dict[str, Any]:
        buckets = [options.positionwise_buckets, options.positionwise_bucket_count]
        return {**super().parameters(options), "buckets": buckets}

    def wanted(self, options: EvaluationOptions, splits: Sequence[str]) -> list[Place]:
        return [(split, max(options.eval_lengths)) for split in splits]

    def comparable_in_old_file(self, results: dict[str, Any]) -> dict[str, Any]:
        return longest([*self._entries(results).values()])

    def cells(self, results: dict[str, Any]) -> Mapping[Place, PositionEntry]:
        found = self._entries(results)
        return {(split, entry.length): entry for split, entry in found.items()}

    @staticmethod
    def _entries(results: Mapping[str, Any]) -> dict[str, PositionEntry]:
        return {split: PositionEntry.model_validate(entry) for split, entry in results.items()}

    def measure(self, context: Context) -> dict[str, Any]:
        longest_first = context.options.eval_lengths[::-1]
        found = {
            split: next(self.entries(context, split, longest_first), None)
            for split in context.options.splits
        }
        return {split: entry for split, entry in found.items() if entry is not None}

    def entry(self, context: Context, files: list[SplitTokens], length: int) -> dict[str, Any]:
        options, split = context.options, files[0].which
        sequences = sequences_of(options, files, length)
        losses = self.losses(context, sequences, split)
        by_position = torch.stack(losses).double().mean(0)
        if not bool(by_position.isfinite().all()):
            raise EvaluationError(f"{split} at {length}: the loss is not finite at some positions")
        kind, count = options.positionwise_buckets, options.positionwise_bucket_count
        return {
            "length": length,
            "buckets": [
                _bucket(by_position, start, end, len(sequences))
                for start, end in pairwise(bucket_edges(length, kind, count))
            ],
            "by_position": [round(float(loss), 4) for loss in by_position],
            "window": options.eval_window,
            "sequences": len(sequences),
        }

    def table(self, results: dict[str, Any]) -> str:
        rows = [
            [split, f"{own['start']}-{own['end'] - 1}", own["loss"], own["ppl"], own["tokens"]]
            for split, entry in results.items()
            for own in entry["buckets"]
        ]
        return text_table(["split", "positions", "loss", "ppl", "tokens"], rows)


def _bucket(by_position: Tensor, start: int, end: int, sequences: int) -> dict[str, Any]:
    loss = float(by_position[start:end].mean())
    tokens = (end - start) * sequences
    return {"start": start, "end": end, "loss": loss, "ppl": perplexity(loss), "tokens": tokens}
