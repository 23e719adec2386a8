"""Induction: can a model copy from its context, and from how far back?

A text is random tokens whose last `distance` tokens repeat those before them. Random tokens cannot
be predicted; their repetition can, by a model that finds where the current token occurred before
and copies what followed it::

    length 12, distance 4      7 3 9 1 | 5 8 2 6 | 5 8 2 6      scored: the last 8 2 6
    length 12, distance 6      7 3 9 1 5 8 | 7 3 9 1 5 8        the second half repeats the first

The first repeated token is not scored: nothing tells that the repetition begins. A loss like that
of random tokens (at best the logarithm of the vocabulary) means that the model does not copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

import torch

from megatron.errors import EvaluationError
from megatron.evaluation.losses import sequence_losses
from megatron.evaluation.results_schema import OpenModel
from megatron.evaluation.sequences import SequenceSet
from megatron.evaluation.tasks import Context, EvaluationOptions, GridTask, GroupView, Place, task
from megatron.evaluation.text_tables import text_table

SHORTEST_DISTANCE = 8
REPEATED, BY_DISTANCE = "repeated", "by_distance"


def distances(length: int) -> list[int]:
    """Powers of two from 8 on, and half of the length, at which the second half is scored."""
    found = [SHORTEST_DISTANCE]
    while 2 * found[-1] < length // 2:
        found.append(2 * found[-1])
    return [*(distance for distance in found if distance < length // 2), length // 2]


def repeated_text(length: int, distance: int, vocabulary: Sequence[int], seed: str) -> list[int]:
    """Random tokens whose last `distance` ones repeat those before them."""
    tokens = Random(seed).choices(vocabulary, k=length - distance)
    return tokens + tokens[-distance:]


class DistanceEntry(OpenModel):
    distance: int
    loss: float


class InductionEntry(OpenModel):
    length: int
    loss: float
    by_distance: list[DistanceEntry]


@task("induction")
class Induction(GridTask):
    """Loss on repeated random tokens: on the second half of each length, and by distance."""

    kinds = (REPEATED,)
    needs_longest = True  # its losses by distance
    views = (
        GroupView(
            "induction",
            "Induction against length",
            "Loss on the second half of repeated random tokens, mean over seeds, shaded by one "
            "standard deviation. Lower: the model copies from half the length back.",
            {REPEATED: "Second half of repeated random tokens"},
            "loss (nats/token)",
            "Loss on the second half of repeated random tokens in nats, mean ± standard deviation "
            "over seeds.",
        ),
        GroupView(
            "induction_distance",
            "Induction against distance",
            "Loss on repeated random tokens by the distance of their first occurrence, in texts of "
            "the longest length.",
            {BY_DISTANCE: "Repeated random tokens by distance"},
            "loss (nats/token)",
            xlabel="distance of the first occurrence (tokens)",
        ),
    )

    def parameters(self, options: EvaluationOptions) -> dict[str, Any]:
        return {
            "lengths": options.eval_lengths,
            "num_sequences": options.eval_num_sequences,
            "data_seed": options.data_seed,
            "window": options.eval_window,
        }

    def work(self, options: EvaluationOptions) -> list[tuple[int, int]]:
        count = options.eval_num_sequences
        return [(len(distances(n)) * count * n, n) for n in options.eval_lengths]

    def entry(self, context: Context, kind: str, length: int) -> dict[str, Any]:
        if length < 4:
            raise EvaluationError(f"{length} tokens are too few to repeat; use longer eval_lengths")
        options, tokenizer = context.options, context.tokenizer()
        vocabulary = [token for token in range(tokenizer.vocab_size) if token != tokenizer.eod]
        entries, losses = [], torch.empty(0)
        for distance in distances(length):
            texts = [
                repeated_text(
                    length, distance, vocabulary, f"{options.data_seed}/{length}/{number}"
                )
                for number in range(options.eval_num_sequences)
            ]
            readers = [partial(torch.tensor, text) for text in texts]
            label = f"induction {length} {distance}"
            losses = torch.stack(sequence_losses(context, SequenceSet(length - 1, readers), label))
            scored = losses[:, length - distance :].double()
            entries.append(
                {"distance": distance, "loss": float(scored.mean()), "tokens": scored.numel()}
            )
        return {
            "kind": kind,
            "length": length,
            "loss": entries[-1]["loss"],
            "random_loss": float(losses[:, : length - length // 2 - 1].double().mean()),
            "by_distance": entries,
            "sequences": options.eval_num_sequences,
        }

    def cells(self, results: dict[str, Any]) -> Mapping[Place, float]:
        grid = [InductionEntry.model_validate(entry) for entry in results.get("grid", [])]
        found = {(REPEATED, entry.length): entry.loss for entry in grid}
        if grid:
            longest = max(grid, key=lambda entry: entry.length)
            found |= {(BY_DISTANCE, own.distance): own.loss for own in longest.by_distance}
        return found

    def table(self, results: dict[str, Any]) -> str:
        rows = [
            [entry["length"], own["distance"], own["loss"], entry["random_loss"], own["tokens"]]
            for entry in results["grid"]
            for own in entry["by_distance"]
        ]
        return text_table(["length", "distance", "loss", "random", "tokens"], rows)
