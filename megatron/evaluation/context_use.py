"""How much of a long context counts: LongPPL, and the receptive field.

LongPPL (Fang et al., 2024) is perplexity over the tokens that need a long context. An evaluator
model sees every token twice: with all that precedes it, and with a short context. A token is a key
token when the long context raises its log-probability by more than 2 and makes that
log-probability larger than -2. LongPPL is the perplexity of the key tokens under the model.

The short contexts are the published ones: for d tokens at a time, the K tokens before them and
those among the d that precede the token. K is 4,096 and d 1,024 there; here K is
`longppl_short_context` (the training length unless given) and d a quarter of it::

    K = 4, d = 2     tokens   0 1 2 3 4 5 6 7
                     short    [. . . . s s]
                                  [. . . . s s]       s: scored, .: context only
                     long     [. . . . s s s s]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megatron.errors import EvaluationError
from megatron.evaluation.losses import LossModel, Texts, current_bar, perplexity, sequence_losses
from megatron.evaluation.perplexity import TaskByLength, sequences_of, table_by_length
from megatron.evaluation.results_schema import text_table
from megatron.evaluation.sequences import SequenceSet, SplitTokens
from megatron.evaluation.tasks import Context, EvaluationOptions, task

if TYPE_CHECKING:
    from megatron.model import GPTModel

GAIN = 2.0
"""Log-probability that the long context must add (the paper's alpha)."""
FLOOR = -2.0
"""What the log-probability with the long context must exceed (the paper's beta)."""


def key_tokens(long_losses: Tensor, short_losses: Tensor) -> Tensor:
    """Which tokens need the long context, from their losses with and without it."""
    return (short_losses - long_losses > GAIN) & (-long_losses > FLOOR)


class _Window(NamedTuple):
    text: int
    start: int
    scored: int


class ShortContexts:
    """The windows over each text: `context` tokens, then up to `step` that are scored."""

    def __init__(self, texts: Texts, context: int, step: int) -> None:
        self.texts, self.length = texts, context + step - 1
        self.windows = [
            _Window(number, start, min(context + step, texts.length + 1 - start) - context)
            for number in range(len(texts))
            for start in range(0, texts.length + 1 - context, step)
        ]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, number: int) -> Tensor:
        """The window's tokens; a short last one is filled at the right, where nothing looks."""
        window = self.windows[number]
        tokens = self.texts[window.text][window.start : window.start + self.length + 1]
        missing = self.length + 1 - len(tokens)
        return torch.nn.functional.pad(tokens, (0, missing)) if missing else tokens

    def scored(self, losses: Sequence[Tensor], context: int) -> list[Tensor]:
        """For each text, the losses of its tokens from number `context` on."""
        parts: list[list[Tensor]] = [[] for _ in range(len(self.texts))]
        for window, loss in zip(self.windows, losses, strict=True):
            parts[window.text].append(loss[context - 1 : context - 1 + window.scored])
        return [torch.cat(part) for part in parts]


def long_perplexity(
    model_losses: Sequence[Tensor], long_losses: Sequence[Tensor], short_losses: Sequence[Tensor]
) -> dict[str, Any]:
    """The result from losses of the same tokens: the model's, the evaluator's long and short."""
    losses = torch.cat(list(model_losses)).double()
    keys = key_tokens(torch.cat(list(long_losses)), torch.cat(list(short_losses)))
    count = int(keys.sum())
    loss = float(losses[keys].mean()) if count else None
    return {
        "longppl": perplexity(loss) if loss is not None else None,
        "loss": loss,
        "ppl": perplexity(float(losses.mean())),
        "key_tokens": count,
        "tokens": losses.numel(),
    }


@task("longppl")
class LongPPL(TaskByLength):
    """Perplexity of the tokens that need more than a short context, at each length."""

    def file_name(self, options: EvaluationOptions) -> str:
        return self.name

    def parameters(self, options: EvaluationOptions) -> dict[str, Any]:
        own = {"short_context": _short_context(options), "evaluator": options.longppl_evaluator}
        return {**super().parameters(options), **own}

    def work(self, options: EvaluationOptions) -> list[tuple[int, int]]:
        return []

    def measure(self, context: Context) -> dict[str, Any]:
        self.evaluator = lru_cache(partial(_evaluator, context))  # loaded once, if at all
        return super().measure(context)

    def entry(self, context: Context, files: list[SplitTokens], length: int) -> dict[str, Any]:
        options, split = context.options, files[0].which
        short = _short_context(options)
        if length <= short:
            raise EvaluationError(
                f"no longer than the short context of {short}; use longer eval_lengths, or a "
                "shorter longppl_short_context"
            )
        texts = sequences_of(options, files, length)
        windows = ShortContexts(texts, short, max(1, short // 4))

        def losses(model: LossModel, of: Texts, kind: str) -> list[Tensor]:
            return sequence_losses(
                model,
                of,
                ranks=context.ranks,
                batch_tokens=options.batch_tokens,
                label=f"longppl {split} {length} {kind}",
            )

        model = self.evaluator()
        seen_long = losses(context.model, texts, "long")
        judged_long = seen_long if model is context.model else losses(model, texts, "evaluator")
        judged_short = windows.scored(losses(model, windows, "short"), short)
        result = long_perplexity(
            [loss[short - 1 :] for loss in seen_long],
            [loss[short - 1 :] for loss in judged_long],
            judged_short,
        )
        return {"length": length, "short_context": short, "sequences": len(texts), **result}

    def table(self, results: dict[str, Any]) -> str:
        return table_by_length(results, "length", "longppl", "ppl", "key_tokens", "tokens")


def _short_context(options: EvaluationOptions) -> int:
    return options.longppl_short_context or options.train_length


def _evaluator(context: Context) -> GPTModel:
    place = context.options.longppl_evaluator
    if place is None:
        return context.model
    from megatron.generation.pretrained import load_pretrained

    found: GPTModel = load_pretrained(place, device=str(context.device)).eval()
    asked, have = context.model.spec.padded_vocab_size, found.spec.padded_vocab_size
    if asked != have:
        raise EvaluationError(
            f"longppl_evaluator {place}: a vocabulary of {have} tokens, the model's has {asked}; "
            "the evaluator must read the same tokens"
        )
    return found


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
class ReceptiveField(TaskByLength):
    """How far back the last prediction looks: the cumulated influence of the last n tokens.

    The gradient of the last position's output with respect to the embedding of each input position
    is taken; its norms, normalised to 1 and cumulated from the end, tell which share of the
    influence the last n tokens have. A model whose share reaches 99% after n tokens sees n tokens.
    """

    def entry(self, context: Context, files: list[SplitTokens], length: int) -> dict[str, Any]:
        sequences = sequences_of(context.options, files, length)
        numbers = range(min(len(sequences), MAX_SEQUENCES))
        label = f"{self.name} {files[0].which} {length}"
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


def _cumulated(
    context: Context, sequences: SequenceSet, label: str, numbers: Sequence[int]
) -> list[Tensor]:
    """For each sequence, the share of the last 1, 2, ... tokens."""
    curves = []
    bar = current_bar()
    bar.at(label)
    for i in numbers:
        norms = input_gradient_norms(context.model, sequences[i][:-1])
        curves.append(norms.flip(0).cumsum(0) / norms.sum())
        bar.advance(sequences.length * context.ranks.size, sequences.length)
    return curves
