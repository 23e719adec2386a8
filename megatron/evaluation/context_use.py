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
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron.errors import EvaluationError
from megatron.evaluation.losses import perplexity, sequence_losses
from megatron.evaluation.perplexity import TaskByLength, sequences_of, table_by_length
from megatron.evaluation.sequences import SequenceSet, SplitTokens
from megatron.evaluation.tasks import Context, EvaluationOptions, task
from megatron.evaluation.text_tables import text_table

if TYPE_CHECKING:
    from megatron.model import GPTModel

GAIN = 2.0
"""Log-probability that the long context must add (the paper's alpha)."""
FLOOR = -2.0
"""What the log-probability with the long context must exceed (the paper's beta)."""


def key_tokens(long_losses: Tensor, short_losses: Tensor) -> Tensor:
    """Which tokens need the long context, from their losses with and without it."""
    return (short_losses - long_losses > GAIN) & (-long_losses > FLOOR)


def short_contexts(texts: SequenceSet, context: int, step: int) -> SequenceSet:
    """The windows over each text: `context` tokens, then `step` that are scored.

    The last one of a text is padded at the right, which a causal model does not see.
    """
    size = context + step

    def window(number: int, start: int) -> Tensor:
        tokens = texts[number][start : start + size]
        return pad(tokens, (0, size - len(tokens)))

    starts = range(0, texts.length + 1 - context, step)
    windows = [partial(window, number, start) for number in range(len(texts)) for start in starts]
    return SequenceSet(size - 1, windows)


def scored(window_losses: Sequence[Tensor], texts: SequenceSet, context: int) -> Tensor:
    """For each text, the losses of its tokens from number `context` on."""
    by_text = torch.stack(list(window_losses))[:, context - 1 :].reshape(len(texts), -1)
    return by_text[:, : texts.length + 1 - context]


def long_perplexity(
    model_losses: Tensor, long_losses: Tensor, short_losses: Tensor
) -> dict[str, Any]:
    """The result from losses of the same tokens: the model's, the evaluator's long and short."""
    losses = model_losses.double().flatten()
    keys = key_tokens(long_losses, short_losses).flatten()
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

    def parameters(self, options: EvaluationOptions) -> dict[str, Any]:
        own = {
            "short_context": options.longppl_short_context,
            "evaluator": options.longppl_evaluator,
        }
        return {**super().parameters(options), **own}

    def work(self, options: EvaluationOptions) -> list[tuple[int, int]]:
        return []

    def measure(self, context: Context) -> dict[str, Any]:
        self.evaluator = cache(partial(_evaluator, context))  # loaded once, if at all
        return super().measure(context)

    def entry(self, context: Context, files: list[SplitTokens], length: int) -> dict[str, Any]:
        short = context.options.longppl_short_context
        if length <= short:
            raise EvaluationError(
                f"no longer than the short context of {short}; use longer eval_lengths, or a "
                "shorter longppl_short_context"
            )
        texts = sequences_of(context.options, files, length)
        windows = short_contexts(texts, short, max(1, short // 4))
        label = f"longppl {files[0].which} {length}"
        judge = self.evaluator()
        seen = torch.stack(sequence_losses(context, texts, f"{label} long"))
        judged = seen
        if judge is not context.model:
            judged = torch.stack(sequence_losses(context, texts, f"{label} evaluator", judge))
        judged_short = sequence_losses(context, windows, f"{label} short", judge)
        result = long_perplexity(
            seen[:, short - 1 :], judged[:, short - 1 :], scored(judged_short, texts, short)
        )
        return {"length": length, "short_context": short, "sequences": len(texts), **result}

    def table(self, results: dict[str, Any]) -> str:
        return table_by_length(results, "length", "longppl", "ppl", "key_tokens", "tokens")


def _evaluator(context: Context) -> GPTModel:
    place = context.options.longppl_evaluator
    if place is None:
        return context.model
    from megatron.generation.pretrained import load_pretrained

    found: GPTModel = load_pretrained(place, device=context.model.device).eval()
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
    """The receptive field of the last prediction: the cumulated influence of the last n tokens.

    The gradient of the last position's output with respect to the embedding of each input position
    is taken; its norms, normalised to 1 and cumulated from the end, give the share of the last n
    tokens. A model whose share reaches 99% after n tokens has a receptive field of n tokens.
    """

    def entry(self, context: Context, files: list[SplitTokens], length: int) -> dict[str, Any]:
        sequences = sequences_of(context.options, files, length)
        numbers = range(min(len(sequences), MAX_SEQUENCES))
        cumulated = context.in_batches(
            partial(_cumulated, context.model, sequences),
            numbers,
            length,
            f"{self.name} {files[0].which} {length}",
        )
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
            [split, entry["length"], *entry["tokens_for"].values(), entry["sequences"]]
            for split, entries in results.items()
            for entry in entries
        ]
        shares = [f"{share:.0%}" for share in SHARES]
        return text_table(["split", "length", *shares, "sequences"], rows)


def _cumulated(model: GPTModel, sequences: SequenceSet, numbers: Sequence[int]) -> list[Tensor]:
    """For each sequence, the share of the last 1, 2, ... tokens."""
    norms = [input_gradient_norms(model, sequences[i][:-1]) for i in numbers]
    return [own.flip(0).cumsum(0) / own.sum() for own in norms]
