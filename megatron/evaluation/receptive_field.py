"""Receptive field: how far back the last prediction looks.

The gradient of the last position's output with respect to the embedding of each input position is
taken; its norms, normalised to 1 and cumulated from the end, tell which share of the influence the
last n tokens have. A model whose share reaches 99% after n tokens sees n tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.evaluation.extrapolation import (
    data_parameters,
    measure_lengths,
    sequences_of,
    window_suffix,
)
from megatron.evaluation.results_schema import text_table
from megatron.evaluation.sequences import SequenceSet, open_split
from megatron.evaluation.tasks import Context, EvaluationOptions, EvaluationTask, Split, task
from megatron.evaluation.total_bar import current_bar

if TYPE_CHECKING:
    from megatron.model import GPTModel

__all__ = ["ReceptiveField", "input_gradient_norms", "tokens_covering"]

SHARES = (0.5, 0.9, 0.99)
MAX_SEQUENCES = 32  # gradients keep all activations, and their mean settles quickly
CURVE_POINTS = 64


def input_gradient_norms(model: GPTModel, tokens_L: Tensor) -> Tensor:
    """Norm of d(logit of the most likely next token) / d(embedding), for each input position."""
    captured: list[Tensor] = []

    def keep(_module: object, _inputs: object, output: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_()
        captured.append(leaf)
        return leaf

    hook = model.embedding.word_embeddings.register_forward_hook(keep)
    try:
        with torch.enable_grad():
            hidden = model.hidden_states(tokens_L[None].to(model.device))
            logit = model.head(hidden[:, -1]).float().max()
            (gradient,) = torch.autograd.grad(logit, captured[0])
    finally:
        hook.remove()
    return gradient[0].double().norm(dim=-1).cpu()


def tokens_covering(shares_from_end: Tensor, share: float) -> int:
    """The fewest last tokens whose cumulated share reaches `share`."""
    return int((shares_from_end < share - 1e-12).sum()) + 1


@task("receptive_field")
class ReceptiveField(EvaluationTask):
    """Cumulated influence of the last n tokens at each length."""

    needs_data = True

    def file_name(self, options: EvaluationOptions) -> str:
        return f"{self.name}{window_suffix(options)}"

    def parameters(self, options: EvaluationOptions) -> dict[str, Any]:
        return {**data_parameters(options), "lengths": options.lengths}

    def work(self, options: EvaluationOptions) -> list[tuple[int, int]]:
        return options.planned()

    def run(self, context: Context) -> dict[str, Any]:
        return measure_lengths(context, partial(_measure, context))

    def table(self, results: dict[str, Any]) -> str:
        rows = [
            [
                split,
                str(entry["length"]),
                *(str(entry["tokens_for"][f"{share:g}"]) for share in SHARES),
                str(entry["sequences"]),
            ]
            for split, entries in results.items()
            for entry in entries
        ]
        shares = [f"{share:.0%}" for share in SHARES]
        return text_table(["split", "length", *shares, "sequences"], rows)


def _measure(context: Context, split: Split, length: int) -> dict[str, Any]:
    options = context.options
    sequences = sequences_of(options, open_split(options.data, split), length)
    numbers = range(min(len(sequences), MAX_SEQUENCES))
    label = f"receptive_field {split} {length}"
    cumulated = context.ranks.map(partial(_cumulated, context, sequences, label), numbers)
    mean = torch.stack(cumulated).mean(0)
    step = max(1, length // CURVE_POINTS)
    return {
        "length": length,
        "sequences": len(numbers),
        "tokens_for": {f"{share:g}": tokens_covering(mean, share) for share in SHARES},
        "curve": [
            {"tokens": count, "share": float(mean[count - 1])}
            for count in sorted({1, *range(step, length + 1, step), length})
        ],
    }


def _cumulated(
    context: Context, sequences: SequenceSet, label: str, numbers: Sequence[int]
) -> list[Tensor]:
    """For each sequence, the share of the last 1, 2, ... tokens."""
    curves = []
    bar = current_bar()
    bar.at(label)
    for number in numbers:
        norms = input_gradient_norms(context.model, sequences[number][:-1])
        curves.append(norms.flip(0).cumsum(0) / norms.sum())
        bar.advance(sequences.length * context.ranks.size, sequences.length)
    return curves
