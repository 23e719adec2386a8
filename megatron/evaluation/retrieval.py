"""Retrieval: passkey retrieval in English, recall in made-up text, and where attention looks there.

A passkey is a number hidden in filler text, to be repeated at the end. Prompts are made
here, from a seed, with the model's own tokenizer, so nothing is downloaded::

    The grass is green. ... The pass key is 53170. Remember it. ... The sky is blue.
    What is the pass key? The pass key is [53170]

`depth` is the key's position: 0 at the start of the filler, 1 right before the question. A prompt
counts when all digits are the most likely continuation, as in greedy decoding; one forward pass
shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from megatron.data.recall_text import RECALL_KINDS, RecallText
from megatron.errors import EvaluationError
from megatron.evaluation.losses import score_continuations, score_tokens
from megatron.evaluation.results_schema import OpenModel
from megatron.evaluation.ruler_prompts import NOISE
from megatron.evaluation.tasks import (
    Context,
    EvaluationOptions,
    GridTask,
    GroupView,
    Place,
    View,
    WindowedTask,
    task,
)
from megatron.evaluation.text_tables import text_table

if TYPE_CHECKING:
    from megatron.model import GPTModel
    from megatron.tokenizer import Tokenizer

INTRODUCTION = "There is a pass key hidden in this text. Find it and memorize it."
KEY = " The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = " What is the pass key? The pass key is"


def make_prompt(
    tokenizer: Tokenizer, length: int, depth: float, digits: int, random: Random
) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and of its answer, together `length` of them."""
    key = str(random.randrange(10 ** (digits - 1), 10**digits))
    start = tokenizer.tokenize(INTRODUCTION)
    hint = tokenizer.tokenize(KEY.format(key=key))
    question = tokenizer.tokenize(QUESTION)
    whole = tokenizer.tokenize(f"{QUESTION} {key}")
    answer = whole[len(question) :] if whole[: len(question)] == question else []
    answer = answer or tokenizer.tokenize(f" {key}")
    filler_tokens = length - len(start) - len(hint) - len(question) - len(answer)
    if filler_tokens < 0:
        raise EvaluationError(
            f"passkey at {length}: the prompt without filler has {length - filler_tokens} tokens; "
            "use longer passkey_lengths"
        )
    unit = tokenizer.tokenize(f" {NOISE}")
    filler = (unit * (filler_tokens // len(unit) + 1))[:filler_tokens]
    place = round(depth * filler_tokens)
    return start + filler[:place] + hint + filler[place:] + question, answer


@task("passkey")
class Passkey(WindowedTask):
    """Accuracy on a grid of lengths and depths."""

    def parameters(self, options: EvaluationOptions) -> dict[str, Any]:
        return {
            "lengths": options.passkey_lengths,
            "depths": options.passkey_depths,
            "samples": options.passkey_samples,
            "digits": options.passkey_digits,
            "seed": options.seed,
            "window": options.eval_window,
        }

    def work(self, options: EvaluationOptions) -> list[tuple[int, int]]:
        prompts = options.passkey_depths * options.passkey_samples
        return [(prompts * length, length) for length in options.passkey_lengths]

    def measure(self, context: Context) -> dict[str, Any]:
        options = context.options
        rows = context.cells.grid(partial(_accuracies, context), length=options.passkey_lengths)
        return {"digits": options.passkey_digits, "grid": [cell for row in rows for cell in row]}

    def table(self, results: dict[str, Any]) -> str:
        grid = results["grid"]
        depths = sorted({cell["depth"] for cell in grid})
        found = {(cell["length"], cell["depth"]): cell["accuracy"] for cell in grid}
        rows = [
            [length, *(f"{found[length, depth]:.2f}" for depth in depths)]
            for length in sorted({cell["length"] for cell in grid})
        ]
        return text_table(["length", *(f"{depth:.2f}" for depth in depths)], rows)


def _depths(count: int) -> list[float]:
    return [round(i / (count - 1), 4) for i in range(count)] if count > 1 else [0.5]


def _accuracies(context: Context, length: int) -> list[dict[str, Any]]:
    """Accuracy of prompts and of their tokens, at each depth of one length."""
    options = context.options
    tokenizer = context.tokenizer()
    depths = _depths(options.passkey_depths)
    prompts = []
    for depth in depths:
        random = Random(f"{options.seed}/{length}/{depth}")  # a cell does not depend on the others
        prompts += [
            make_prompt(tokenizer, length, depth, options.passkey_digits, random)
            for _ in range(options.passkey_samples)
        ]
    scores = context.in_batches(
        partial(score_continuations, context.model), prompts, length, f"passkey {length}"
    )
    hits = [score.greedy.tolist() for score in scores]
    cells = []
    for i, depth in enumerate(depths):
        own = hits[i * options.passkey_samples : (i + 1) * options.passkey_samples]
        cells.append(
            {
                "length": length,
                "depth": depth,
                "accuracy": sum(all(hit) for hit in own) / len(own),
                "token_accuracy": sum(map(sum, own)) / sum(map(len, own)),
                "samples": len(own),
            }
        )
    return cells


RECALL_TITLES = {
    "digit_in_noise": "One digit in noise",
    "mqar": "Associative recall (four pairs)",
    "passkey_in_noise": "Passkey of four digits in noise",
}


class RecallEntry(OpenModel):
    kind: str
    length: int
    accuracy: float


@task("recall")
class Recall(GridTask):
    """Recall of earlier symbols, at distances beyond the training length.

    For models trained on the corpus `recall` (`prepare_data.py recall`): new documents of each
    length, and the share of recalled symbols that are the most likely ones, overall and by how far
    back they were first seen.
    """

    kinds = tuple(RECALL_KINDS)
    views: ClassVar[tuple[View, ...]] = (
        GroupView(
            "recall",
            "Recall against length",
            "Symbols that only recall can predict, mean over seeds, shaded by one standard "
            "deviation. Guessing one of the four values at hand gives 25%, of ten digits 10%.",
            RECALL_TITLES,
            "symbols recalled (%)",
            "Symbols recalled in percent, mean ± standard deviation over seeds.",
            scale=100,
            limits=(-3, 103),
        ),
    )

    def parameters(self, options: EvaluationOptions) -> dict[str, Any]:
        return {
            "lengths": options.eval_lengths,
            "samples": options.recall_samples,
            "seed": options.data_seed,
            "window": options.eval_window,
        }

    def cells(self, results: dict[str, Any]) -> Mapping[Place, float]:
        grid = [RecallEntry.model_validate(entry) for entry in results.get("grid", [])]
        return {(entry.kind, entry.length): entry.accuracy for entry in grid}

    def work(self, options: EvaluationOptions) -> list[tuple[int, int]]:
        texts = len(RECALL_KINDS) * options.recall_samples
        return [(texts * length, length) for length in options.eval_lengths]

    def entry(self, context: Context, kind: str, length: int) -> dict[str, Any]:
        made = made_texts(context.options, kind, length)
        tokens = [symbol_tokens(context, item) for item in made]

        def hits(numbers: Sequence[int]) -> list[list[bool]]:
            texts, places = [tokens[i] for i in numbers], [made[i].places for i in numbers]
            return [score.greedy.tolist() for score in score_tokens(context.model, texts, places)]

        found = context.in_batches(hits, range(len(made)), length, f"recall {kind} {length}")
        return {"kind": kind, "length": length, **_summary(made, found)}

    def table(self, results: dict[str, Any]) -> str:
        rows = [
            [
                own["kind"],
                own["length"],
                f"{own['accuracy']:.3f}",
                f"{own['whole']:.3f}",
                own["symbols"],
            ]
            for own in results["grid"]
        ]
        return text_table(["kind", "length", "accuracy", "all right", "symbols"], rows)


def made_texts(options: EvaluationOptions, kind: str, length: int) -> list[RecallText]:
    """The texts of one cell: the same for every model."""
    return [
        RECALL_KINDS[kind](length, Random(f"{options.data_seed}/{kind}/{length}/{number}"))
        for number in range(options.recall_samples)
    ]


def symbol_tokens(context: Context, made: RecallText) -> list[int]:
    """A token for each symbol."""
    tokenizer = context.tokenizer()
    tokens = tokenizer.tokenize(made.text)
    if len(tokens) != len(made.text):
        raise EvaluationError(
            f"{tokenizer.name} does not give one token per symbol; recall is for models of the "
            "corpus `recall` with CharLevelTokenizer"
        )
    return tokens


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


# Where attention looks when something must be recalled.
#
# At the position whose next symbol only recall can predict, every head of every layer spreads a
# weight of 1 over the keys. A weighted sum of values that are 1 on some keys and 0 elsewhere is the
# weight on these keys: what the model's own attention function gives for such values, with any
# method and engine. No matrix of weights is made.

Attend = Callable[..., Tensor]
FAR = "_far"


class HeadEntry(OpenModel):
    layer: int
    head: int
    answer: float
    far: float

    def counted_from_1(self) -> tuple[str, str]:
        return str(self.layer + 1), str(self.head + 1)


class AttentionEntry(OpenModel):
    kind: str
    length: int
    heads: list[HeadEntry]

    def best(self) -> HeadEntry:
        """The head that looks most at the answer."""
        return max(self.heads, key=lambda head: head.answer)


@task("recall_attention")
class RecallAttention(Recall):
    """Share of attention on what must be recalled, and on all else beyond the training length."""

    views = (
        GroupView(
            "recall_attention",
            "Attention on the answer against length",
            "Share of a query's attention that lies on the answer's first occurrence, in the head "
            "where it is largest, mean over texts and seeds, shaded by one standard deviation.",
            RECALL_TITLES,
            "attention on the answer (%)",
            "Attention on the answer in percent, in the head where it is largest, mean ± standard "
            "deviation over seeds.",
            scale=100,
            limits=(-3, 103),
        ),
        GroupView(
            "far_attention",
            "Attention on other far keys against length",
            "In the same head: share of attention on all other keys further back than the training "
            "length, mean over texts and seeds, shaded by one standard deviation.",
            {kind + FAR: title for kind, title in RECALL_TITLES.items()},
            "attention on other far keys (%)",
            scale=100,
            limits=(-3, 103),
        ),
    )

    def cells(self, results: dict[str, Any]) -> Mapping[Place, float]:
        grid = [AttentionEntry.model_validate(entry) for entry in results.get("grid", [])]
        found = {(entry.kind, entry.length): entry.best().answer for entry in grid}
        return found | {(entry.kind + FAR, entry.length): entry.best().far for entry in grid}

    def entry(self, context: Context, kind: str, length: int) -> dict[str, Any]:
        made = made_texts(context.options, kind, length)
        tokens = [symbol_tokens(context, item) for item in made]
        near = context.model.spec.seq_length

        def shares(numbers: Sequence[int]) -> list[Tensor]:
            places = [torch.tensor(made[number].places) for number in numbers]
            answers = [
                own - torch.tensor(made[number].distances)
                for own, number in zip(places, numbers, strict=True)
            ]
            texts = torch.tensor([tokens[number] for number in numbers])
            return _shares(
                context.model, texts, torch.stack(places) - 1, torch.stack(answers), near
            )

        label = f"recall_attention {kind} {length}"
        found = torch.stack(context.in_batches(shares, range(len(made)), length, label))
        mean = found.double().mean((0, 3)).tolist()
        return {
            "kind": kind,
            "length": length,
            "samples": len(made),
            "heads": [
                {"layer": layer, "head": head, "answer": answer, "far": far}
                for layer, heads in enumerate(mean)
                for head, (answer, far) in enumerate(heads)
            ],
        }

    def table(self, results: dict[str, Any]) -> str:
        entries = [AttentionEntry.model_validate(entry) for entry in results["grid"]]
        rows: list[list[str | float]] = [
            [entry.kind, entry.length, *best.counted_from_1(), best.answer, best.far]
            for entry, best in zip(entries, [entry.best() for entry in entries], strict=True)
        ]
        return text_table(["kind", "length", "layer", "head", "on the answer", "far"], rows)


@torch.inference_mode()
def _shares(
    model: GPTModel, texts: Tensor, queries: Tensor, answers: Tensor, near: int
) -> list[Tensor]:
    """Of each text: [layers, heads, queries, 2], the weight on the answer and on other far keys."""
    if model.tp.size > 1:
        raise EvaluationError("needs all heads on one rank; evaluate with model_parallel_size: 1")
    keys = torch.arange(texts.shape[1])[:, None]
    on_answer = keys == answers[:, None]
    far = (keys <= queries[:, None] - near) & ~on_answer
    found: list[Tensor] = []
    with _observed(model, partial(_marked, torch.stack([on_answer, far]), queries, found)):
        model.hidden_states(texts.to(model.device))
    return list(torch.stack(found, 1).cpu())


def _marked(marks: Tensor, queries: Tensor, found: list[Tensor], attend: Attend) -> Attend:
    """`attend`, which also adds [texts, heads, queries, marks] to `found`; marks [2, B, L, Q]."""
    kinds, batch, _, count = marks.shape

    def both(q: Tensor, k: Tensor, v: Tensor, *tables: Any, **options: Any) -> Tensor:
        if v.shape[-1] < kinds * count:
            raise EvaluationError(f"needs heads of at least {kinds * count} numbers")
        values = torch.zeros_like(v)
        values[..., : kinds * count] = torch.cat([*marks], -1)[:, None].to(v)
        weights = attend(q, k, values, *tables, **options)
        row, own = torch.arange(batch)[:, None], torch.arange(count)
        asked = weights[row, :, queries]  # [texts, queries, heads, D]
        columns = [asked[:, own, :, kind * count + own] for kind in range(kinds)]
        found.append(torch.stack(columns, -1).permute(1, 2, 0, 3).float())
        return attend(q, k, v, *tables, **options)

    return both


@contextmanager
def _observed(model: GPTModel, observer: Callable[[Attend], Attend]) -> Iterator[None]:
    """Every layer's attention function goes through `observer`."""
    for layer in model.layers:
        layer.attention.observer = observer
    try:
        yield
    finally:
        for layer in model.layers:
            layer.attention.observer = None
