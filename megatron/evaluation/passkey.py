"""Passkey retrieval: a number hidden in filler text, to be repeated at the end.

Prompts are made here, from a seed, with the model's own tokenizer, so nothing is downloaded::

    The grass is green. ... The pass key is 53170. Remember it. ... The sky is blue.
    What is the pass key? The pass key is [53170]

`depth` says where the key lies: 0 at the start of the filler, 1 right before the question.
A prompt counts when all digits are the most likely continuation, which is what greedy decoding
would produce; one forward pass tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from megatron.errors import EvaluationError
from megatron.evaluation.extrapolation import window_suffix
from megatron.evaluation.losses import score_continuations, windowed
from megatron.evaluation.results_schema import text_table
from megatron.evaluation.tasks import Context, EvaluationOptions, EvaluationTask, task
from megatron.evaluation.total_bar import current_bar

if TYPE_CHECKING:
    from megatron.tokenizer import Tokenizer

__all__ = ["Passkey", "PasskeyPrompt", "make_prompt"]

INTRODUCTION = "There is a pass key hidden in this text. Find it and memorize it."
FILLER = (
    " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
KEY = " The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = " What is the pass key? The pass key is"


@dataclass(frozen=True)
class PasskeyPrompt:
    """Token ids of a prompt and of the answer that should follow."""

    context: list[int]
    answer: list[int]
    key: str


def make_prompt(
    tokenizer: Tokenizer, length: int, depth: float, digits: int, random: Random
) -> PasskeyPrompt:
    """A prompt that is, with its answer, `length` tokens long."""
    key = str(random.randrange(10 ** (digits - 1), 10**digits))
    start = tokenizer.tokenize(INTRODUCTION)
    hint = tokenizer.tokenize(KEY.format(key=key))
    question = tokenizer.tokenize(QUESTION)
    whole = tokenizer.tokenize(f"{QUESTION} {key}")
    answer = whole[len(question) :] if whole[: len(question)] == question else []
    answer = answer or tokenizer.tokenize(f" {key}")
    room = length - len(start) - len(hint) - len(question) - len(answer)
    if room < 0:
        raise EvaluationError(
            f"passkey at {length}: the prompt without filler is {length - room} tokens long; "
            "use longer passkey_lengths"
        )
    unit = tokenizer.tokenize(FILLER)
    filler = (unit * (room // len(unit) + 1))[:room]
    place = round(depth * room)
    return PasskeyPrompt(start + filler[:place] + hint + filler[place:] + question, answer, key)


@task("passkey")
class Passkey(EvaluationTask):
    """Accuracy on a grid of lengths and depths."""

    def file_name(self, options: EvaluationOptions) -> str:
        return f"{self.name}{window_suffix(options)}"

    def parameters(self, options: EvaluationOptions) -> dict[str, Any]:
        return {
            "lengths": options.passkey_lengths,
            "depths": options.passkey_depths,
            "samples": options.passkey_samples,
            "digits": options.passkey_digits,
            "seed": options.seed,
            "window": options.window,
        }

    def work(self, options: EvaluationOptions) -> list[tuple[int, int]]:
        prompts = options.passkey_depths * options.passkey_samples
        return [(prompts * length, length) for length in options.passkey_lengths]

    def run(self, context: Context) -> dict[str, Any]:
        options = context.options
        grid: list[dict[str, Any]] = []
        with windowed(context.model, options.window, context.model.spec.attention_window):
            for length in options.passkey_lengths:
                cells = context.cells.attempt(
                    str(length), partial(_measure, context, length), length=length
                )
                grid += cells or []
        return {"digits": options.passkey_digits, "grid": grid}

    def table(self, results: dict[str, Any]) -> str:
        grid = results["grid"]
        depths = sorted({cell["depth"] for cell in grid})
        found = {(cell["length"], cell["depth"]): cell["accuracy"] for cell in grid}
        rows = [
            [str(length), *(f"{found[length, depth]:.2f}" for depth in depths)]
            for length in sorted({cell["length"] for cell in grid})
        ]
        return text_table(["length", *(f"{depth:.2f}" for depth in depths)], rows)


def _depths(count: int) -> list[float]:
    return [round(i / (count - 1), 4) for i in range(count)] if count > 1 else [0.5]


def _measure(context: Context, length: int) -> list[dict[str, Any]]:
    """Accuracy and digit accuracy at each depth of one length."""
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
    hits = context.ranks.map(partial(_greedy_hits, context, length), prompts)
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


def _greedy_hits(
    context: Context, length: int, prompts: Sequence[PasskeyPrompt]
) -> list[list[bool]]:
    """For each prompt, which tokens of its answer are the most likely ones."""
    hits: list[list[bool]] = []
    rows = max(1, context.options.batch_tokens // length)
    bar = current_bar()
    bar.at(f"passkey {length}")
    with torch.inference_mode():
        for start in range(0, len(prompts), rows):
            group = prompts[start : start + rows]
            scores = score_continuations(
                context.model, [(prompt.context, prompt.answer) for prompt in group]
            )
            hits += [score.greedy.tolist() for score in scores]
            bar.advance(len(group) * length * context.ranks.size, length)
    return hits
