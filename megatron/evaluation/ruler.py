"""RULER for base models: questions about a long context, answered by greedy decoding.

Scores are the published ones: the share of the expected strings that occur in the generated text,
upper and lower case alike, averaged over prompts, in percent. A task with needles also has scores
by depth: the share of the strings found among those that lay in each fifth of the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron.errors import EvaluationError, did_you_mean
from megatron.evaluation.ruler_prompts import (
    RULER_TASKS,
    RulerPrompt,
    longest_prompt,
    smallest_length,
)
from megatron.evaluation.tasks import Context, EvaluationOptions, WindowedTask, task
from megatron.evaluation.text_tables import text_table

DEPTH_BINS = 5


def found_in(text: str, answers: Sequence[str]) -> list[bool]:
    """Which of the expected strings occur in the text."""
    lower = text.lower()
    return [answer.lower() in lower for answer in answers]


def string_match_all(texts: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """RULER's score: the share of each prompt's strings that were found, mean in percent."""
    shares = [
        sum(found_in(text, answers)) / len(answers)
        for text, answers in zip(texts, references, strict=True)
    ]
    return round(100 * sum(shares) / len(shares), 2)


def by_depth(
    texts: Sequence[str], prompts: Sequence[RulerPrompt]
) -> list[dict[str, float | int | None]]:
    """The score of the strings in each fifth of the context; empty for tasks without places."""
    bins: list[list[bool]] = [[] for _ in range(DEPTH_BINS)]
    for text, prompt in zip(texts, prompts, strict=True):
        hits = found_in(text, prompt.answers)
        for depth, hit in zip(prompt.depths, hits, strict=False):
            bins[min(int(depth * DEPTH_BINS), DEPTH_BINS - 1)].append(hit)
    if not any(bins):
        return []
    return [
        {
            "from": round(i / DEPTH_BINS, 2),
            "to": round((i + 1) / DEPTH_BINS, 2),
            "score": round(100 * sum(hits) / len(hits), 2) if hits else None,
            "strings": len(hits),
        }
        for i, hits in enumerate(bins)
    ]


@task("ruler")
class Ruler(WindowedTask):
    """Scores of each RULER task at each length."""

    def parameters(self, options: EvaluationOptions) -> dict[str, Any]:
        return {
            "tasks": _tasks(options),
            "lengths": options.ruler_lengths,
            "samples": options.ruler_samples,
            "seed": options.seed,
            "window": options.eval_window,
        }

    def measure(self, context: Context) -> dict[str, Any]:
        options = context.options
        names = _tasks(options)
        smallest = {name: smallest_length(RULER_TASKS[name], context.tokenizer()) for name in names}
        context.say(
            "smallest lengths: "
            + ", ".join(f"{name} {length}" for name, length in smallest.items())
        )
        cells = context.cells.grid(
            partial(_measure, context), task=names, length=options.ruler_lengths
        )
        return {"grid": list(cells)}

    def table(self, results: dict[str, Any]) -> str:
        rows = []
        for cell in results["grid"]:
            scores = [part["score"] for part in cell["by_depth"]] or [None] * DEPTH_BINS
            percents = [score if score is None else f"{score:.1f}" for score in scores]
            first, last = [cell["task"], cell["length"]], [cell["shots"], cell["samples"]]
            rows.append([*first, f"{cell['score']:.1f}", *percents, *last])
        bins = [f"{i / DEPTH_BINS:.1f}-{(i + 1) / DEPTH_BINS:.1f}" for i in range(DEPTH_BINS)]
        return text_table(["task", "length", "score", *bins, "shots", "samples"], rows)


def _tasks(options: EvaluationOptions) -> tuple[str, ...]:
    names = options.ruler_tasks or tuple(RULER_TASKS)
    for name in names:
        if name not in RULER_TASKS:
            hint = did_you_mean(name, RULER_TASKS, f"Known: {', '.join(RULER_TASKS)}.")
            raise EvaluationError(f'ruler_tasks: "{name}" is unknown. {hint}')
    return tuple(names)


def _measure(context: Context, task: str, length: int) -> dict[str, Any]:
    from megatron.generation.text import TextGenerator  # slow: a report needs the task without it

    options = context.options
    tokenizer = context.tokenizer()
    count = options.ruler_samples
    prompts = [
        longest_prompt(
            RULER_TASKS[task],
            tokenizer,
            length,
            seed=f"{options.seed}/{task}/{length}/{number}",
            depth=(number + 0.5) / count,
        )
        for number in range(count)
    ]
    generator = TextGenerator(
        context.model,
        tokenizer,
        max_new_tokens=max(prompt.new_tokens for prompt in prompts),
        ranks=context.ranks,
    )
    records = generator.samples([prompt.text for prompt in prompts], quiet=True)
    texts = [str(record["text"]) for record in records]
    return {
        "task": task,
        "length": length,
        "score": string_match_all(texts, [prompt.answers for prompt in prompts]),
        "by_depth": by_depth(texts, prompts),
        "shots": min(prompt.shots for prompt in prompts),
        "as_published": all(prompt.full for prompt in prompts),
        "samples": count,
    }
