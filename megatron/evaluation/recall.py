"""Recall by length: does a model find again what it read, further back than it was trained on?

For models trained on the corpus `recall` (`prepare_data.py recall`): new documents of each length,
and the share of recalled symbols that are the most likely ones, overall and by how far back they
were first seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from megatron.data.recall_text import RECALL_KINDS, RecallText
from megatron.errors import EvaluationError
from megatron.evaluation.extrapolation import window_suffix
from megatron.evaluation.losses import windowed
from megatron.evaluation.results_schema import text_table
from megatron.evaluation.tasks import Context, EvaluationOptions, EvaluationTask, task
from megatron.model.embedding import full_logits

if TYPE_CHECKING:
    from megatron.model import GPTModel

__all__ = ["Recall", "hits_at"]


@task("recall")
class Recall(EvaluationTask):
    """Accuracy of associative recall and of passkeys at each length."""

    def file_name(self, options: EvaluationOptions) -> str:
        return f"{self.name}{window_suffix(options)}"

    def parameters(self, options: EvaluationOptions) -> dict[str, Any]:
        return {
            "lengths": options.lengths,
            "samples": options.recall_samples,
            "seed": options.data_seed,
            "window": options.window,
        }

    def run(self, context: Context) -> dict[str, Any]:
        options = context.options
        grid = []
        with windowed(context.model, options.window, context.model.spec.attention_window):
            for kind in RECALL_KINDS:
                for length in options.lengths:
                    cell = context.cells.attempt(
                        f"{kind}/{length}",
                        partial(_measure, context, kind, length),
                        kind=kind,
                        length=length,
                    )
                    grid += [cell] if cell is not None else []
        return {"grid": grid}

    def table(self, results: dict[str, Any]) -> str:
        rows = [
            [
                cell["kind"],
                str(cell["length"]),
                f"{cell['accuracy']:.3f}",
                f"{cell['whole']:.3f}",
                str(cell["symbols"]),
            ]
            for cell in results["grid"]
        ]
        return text_table(["kind", "length", "accuracy", "all right", "symbols"], rows)


def _measure(context: Context, kind: str, length: int) -> dict[str, Any]:
    options = context.options
    made = [
        RECALL_KINDS[kind](length, Random(f"{options.data_seed}/{kind}/{length}/{number}"))
        for number in range(options.recall_samples)
    ]
    tokens = [_tokens(context, item) for item in made]
    rows = max(1, options.batch_tokens // length)

    def share(numbers: Sequence[int]) -> list[list[bool]]:
        found: list[list[bool]] = []
        for start in range(0, len(numbers), rows):
            group = numbers[start : start + rows]
            found += hits_at(
                context.model, [tokens[i] for i in group], [made[i].places for i in group]
            )
        return found

    hits = context.ranks.map(share, range(len(made)))
    return {"kind": kind, "length": length, **_summary(made, hits)}


def _tokens(context: Context, made: RecallText) -> list[int]:
    tokenizer = context.tokenizer()
    tokens = tokenizer.tokenize(made.text)
    if len(tokens) != len(made.text):
        raise EvaluationError(
            f"{tokenizer.name} does not give one token per symbol; recall is for models of the "
            "corpus `recall` with CharLevelTokenizer"
        )
    return tokens


@torch.inference_mode()
def hits_at(
    model: GPTModel, texts: Sequence[Sequence[int]], places: Sequence[Sequence[int]]
) -> list[list[bool]]:
    """For texts of one length: whether the token at each place is the most likely one there."""
    tokens = torch.tensor([list(text) for text in texts], device=model.device)
    hidden = model.hidden_states(tokens[:, :-1])
    found = []
    for row, own in enumerate(places):
        before = torch.tensor([place - 1 for place in own], device=model.device)
        logits = full_logits(model.head(hidden[row, before]), model.head.vocab_tp)
        found.append((logits.argmax(-1) == tokens[row, before + 1]).tolist())
    return found


def _summary(made: Sequence[RecallText], hits: Sequence[Sequence[bool]]) -> dict[str, Any]:
    """Accuracy over symbols and over whole texts, and by distance in steps of two."""
    flat = [hit for own in hits for hit in own]
    distances = [distance for item in made for distance in item.distances]
    steps: dict[int, list[bool]] = {}
    for distance, hit in zip(distances, flat, strict=True):
        steps.setdefault(1 << (distance.bit_length() - 1), []).append(hit)
    return {
        "accuracy": sum(flat) / len(flat),
        "whole": sum(all(own) for own in hits) / len(hits),
        "symbols": len(flat),
        "samples": len(made),
        "by_distance": [
            {"from": low, "to": 2 * low, "accuracy": sum(own) / len(own), "symbols": len(own)}
            for low, own in sorted(steps.items())
        ],
    }
