"""Log-probabilities of given continuations, from one forward pass per batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron.model.embedding import full_logits

if TYPE_CHECKING:
    from megatron.model import GPTModel

__all__ = ["Score", "score_continuations"]

CHUNK = 1024  # positions whose logits exist at the same time


class Score(NamedTuple):
    """One continuation's tokens: log-probability, and whether each is the most likely one."""

    log_probs: Tensor
    greedy: Tensor


@torch.inference_mode()
def score_continuations(
    model: GPTModel,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    vocab_size: int | None = None,
) -> list[Score]:
    """A score for each (context, continuation); no context may be empty.

    Rows are padded at the right end, where a causal model cannot see. `vocab_size` leaves ids that
    only pad the vocabulary out of the softmax.
    """
    rows = [[*context, *continuation] for context, continuation in pairs]
    length = max(len(row) for row in rows) - 1
    inputs = torch.zeros(len(rows), length, dtype=torch.long)
    places: list[int] = []
    labels: list[int] = []
    for number, ((context, continuation), row) in enumerate(zip(pairs, rows, strict=True)):
        inputs[number, : len(row) - 1] = torch.tensor(row[:-1])
        first = number * length + len(context) - 1
        places += range(first, first + len(continuation))
        labels += continuation
    hidden = model.hidden_states(inputs.to(model.device)).flatten(0, 1)
    chosen = hidden[torch.tensor(places, device=model.device)]
    label = torch.tensor(labels, device=model.device)
    log_probs, greedy = [], []
    for h, y in zip(chosen.split(CHUNK), label.split(CHUNK), strict=True):
        logits = full_logits(model.head(h), model.head.vocab_tp)[:, :vocab_size].float()
        log_probs.append(logits.log_softmax(-1).gather(1, y[:, None])[:, 0])
        greedy.append(logits.argmax(-1) == y)
    counts = [len(continuation) for _, continuation in pairs]
    return [
        Score(*score)
        for score in zip(
            torch.cat(log_probs).cpu().split(counts),
            torch.cat(greedy).cpu().split(counts),
            strict=True,
        )
    ]
