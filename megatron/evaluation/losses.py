"""From a model to numbers: losses, scores of given tokens, their summary, a progress bar."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from megatron.errors import EvaluationError
from megatron.generation.decoding import read_prompts
from megatron.model.embedding import full_logits
from megatron.model.loss import DEFAULT_LOSS_CHUNK

if TYPE_CHECKING:
    from megatron.evaluation.sequences import SequenceSet
    from megatron.evaluation.tasks import Context
    from megatron.model import GPTModel


def sequence_losses(
    context: Context, texts: SequenceSet, label: str, model: GPTModel | None = None
) -> list[Tensor]:
    """The fp32 loss at every position of every sequence, on the CPU."""
    measured = model or context.model

    @torch.inference_mode()
    def losses(numbers: Sequence[int]) -> Tensor:
        text = torch.stack([texts[number] for number in numbers])
        _check_tokens(text, measured.spec.padded_vocab_size)
        text = text.to(measured.device)
        return measured.token_losses(text[:, :-1], text[:, 1:]).float().cpu()

    return context.in_batches(losses, range(len(texts)), texts.length, label)


@torch.inference_mode()
def stream_losses(model: GPTModel, text: Tensor, chunk: int) -> Tensor:
    """The fp32 loss of every token of one long text but the first, read once with a cache."""
    _check_tokens(text, model.spec.padded_vocab_size)
    cache, parts = model.new_cache(), []
    for start in range(0, len(text) - 1, chunk):
        piece = text[None, start : start + chunk + 1].to(model.device)
        losses = model.token_losses(piece[:, :-1], piece[:, 1:], cache=cache)
        parts.append(losses[0].float().cpu())
    return torch.cat(parts)


def _check_tokens(text: Tensor, vocabulary: int) -> None:
    worst = int(text.max())
    if worst >= vocabulary:
        raise EvaluationError(
            f"tokenizer mismatch: the data holds token {worst}, the model has {vocabulary}; use "
            "data prepared with the tokenizer the model was trained with"
        )


def mean_and_error(losses: Sequence[Tensor]) -> dict[str, float | int | None]:
    """Token-weighted mean loss, perplexity, and the standard error over sequences."""
    sums = torch.tensor([float(loss.double().sum()) for loss in losses], dtype=torch.float64)
    counts = torch.tensor([loss.numel() for loss in losses], dtype=torch.float64)
    tokens = int(counts.sum())
    mean = float(sums.sum() / tokens)
    if not math.isfinite(mean):
        raise EvaluationError(f"the loss is {mean}: the weights or activations overflow")
    sequences = len(losses)
    # Ratio estimate: residuals of the sequence sums around the mean, so that sequences of
    # different lengths count by their tokens. For equal lengths this is s / sqrt(n).
    spread = sums - mean * counts
    error: float | None = None
    if sequences > 1:
        variance = float((spread**2).sum()) / (sequences - 1)
        error = math.sqrt(variance * sequences) / tokens
    return {
        "loss": mean,
        "ppl": perplexity(mean),
        "stderr": error,
        "tokens": tokens,
        "sequences": sequences,
    }


def perplexity(loss: float) -> float | None:
    """exp(loss); None where that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return None


# Log-probabilities of given tokens, from one forward pass per batch.


class Score(NamedTuple):
    """Some of a text's tokens: log-probability, and whether each is the most likely one."""

    log_probs: Tensor
    greedy: Tensor


@torch.inference_mode()
def score_tokens(
    model: GPTModel, texts: Sequence[Sequence[int]], places: Sequence[Sequence[int]]
) -> list[Score]:
    """The score of each text's tokens at its places, which begin at 1.

    Texts are padded at the right end, where a causal model cannot see.
    """
    inputs = pad_sequence([torch.tensor(text[:-1]) for text in texts], batch_first=True)
    length = inputs.shape[1]
    before = [row * length + place - 1 for row, own in enumerate(places) for place in own]
    labels = [text[place] for text, own in zip(texts, places, strict=True) for place in own]
    hidden = model.hidden_states(inputs.to(model.device)).flatten(0, 1)
    return _scores(model, hidden, before, labels, [*map(len, places)])


def _scores(
    model: GPTModel, hidden: Tensor, before: list[int], labels: list[int], counts: list[int]
) -> list[Score]:
    """Of labels, by the hidden states before them; `counts` says how many are whose."""
    chosen = hidden[torch.tensor(before, device=model.device)]
    label = torch.tensor(labels, device=model.device)
    log_probs, greedy = [], []
    for h, y in zip(*(x.split(DEFAULT_LOSS_CHUNK) for x in (chosen, label)), strict=True):
        logits = full_logits(model.head(h), model.head.vocab_tp).float()
        log_probs.append(logits.log_softmax(-1).gather(1, y[:, None])[:, 0])
        greedy.append(logits.argmax(-1) == y)
    parts = [torch.cat(found).cpu().split(counts) for found in (log_probs, greedy)]
    return [Score(*score) for score in zip(*parts, strict=True)]


def score_continuations(
    model: GPTModel, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[Score]:
    """A score for each (context, continuation); no context may be empty.

    A context that several pairs share is read once, if the model's caches allow it.
    """
    contexts = list(dict.fromkeys(tuple(context) for context, _ in pairs))
    long_enough = all(len(context) > 1 for context in contexts)
    if len(contexts) < len(pairs) and long_enough and model.rows_may_differ:
        return _score_after_contexts(model, contexts, pairs)
    texts = [[*context, *continuation] for context, continuation in pairs]
    places = [
        range(len(context), len(text)) for (context, _), text in zip(pairs, texts, strict=True)
    ]
    return score_tokens(model, texts, places)


@torch.inference_mode()
def _score_after_contexts(
    model: GPTModel,
    contexts: Sequence[tuple[int, ...]],
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> list[Score]:
    """Every context but its last token is read once; that token and the continuation follow it."""
    owner = {context: number for number, context in enumerate(contexts)}
    inputs = pad_sequence(
        [torch.tensor([context[-1], *continuation[:-1]]) for context, continuation in pairs],
        batch_first=True,
    ).to(model.device)
    _, cache = read_prompts(model, [context[:-1] for context in contexts])
    rows = [owner[tuple(context)] for context, _ in pairs]
    cache.select(torch.tensor(rows, device=model.device))
    hidden = model.hidden_states(inputs, cache).flatten(0, 1)
    width = inputs.shape[1]
    before = [row * width + i for row, (_, own) in enumerate(pairs) for i in range(len(own))]
    labels = [token for _, continuation in pairs for token in continuation]
    return _scores(model, hidden, before, labels, [len(own) for _, own in pairs])


# One progress bar for all tasks, with the time left.

BAR = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
SECONDS_BETWEEN_LINES = 5.0


def total_work(hidden_size: int, parts: Iterable[tuple[int, int]]) -> float:
    """Multiplications of a transformer layer for so many tokens in sequences of a length.

    A token at length L costs about 12 x hidden_size for the matrices and L for attention, so a bar
    that counts them moves evenly over all lengths.
    """
    return float(sum(tokens * (12 * hidden_size + length) for tokens, length in parts))


class TotalBar:
    """A progress bar on a terminal; elsewhere a line at intervals. `total` 0 shows nothing."""

    def __init__(self, hidden_size: int, total: float, *, show: bool) -> None:
        self.hidden_size, self.total, self.done = hidden_size, total, 0.0
        self._label = ""
        self._start = self._last_line = time.monotonic()
        shown, terminal = show and total > 0, sys.stderr.isatty()
        self._lines = shown and not terminal
        self._bar = tqdm(
            total=total,
            bar_format=BAR,
            disable=not (shown and terminal),
            dynamic_ncols=True,
            leave=False,  # what stays on the screen are the tables
        )

    def at(self, label: str) -> None:
        """What is being measured now."""
        self._label = label
        self._bar.set_description_str(label)
        self._print_progress()

    def advance(self, tokens: int, length: int) -> None:
        self.move_to(self.done + total_work(self.hidden_size, [(tokens, length)]))

    def move_to(self, done: float) -> None:
        """`done` of the total; data may turn out shorter than planned, or be measured already."""
        done = min(done, self.total)
        self._bar.update(done - self.done)
        self.done = done
        self._print_progress()

    def _print_progress(self) -> None:
        now = time.monotonic()
        if not self._lines or not self.done or now - self._last_line < SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        left = (now - self._start) * (self.total - self.done) / self.done
        share = self.done / self.total
        print(f"{self._label}: {share:.0%}, about {left:.0f} s left", file=sys.stderr, flush=True)

    def close(self) -> None:
        self._bar.close()
