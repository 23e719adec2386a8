"""Losses of many sequences, in batches, shared by all ranks."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from megatron.errors import EvaluationError
from megatron.model import ModelSpec
from megatron.model.embedding import full_logits
from megatron.mpu.job import Ranks

if TYPE_CHECKING:
    from megatron.model import GPTModel


class LossModel(Protocol):
    """What perplexity needs of a model."""

    spec: ModelSpec

    @property
    def device(self) -> torch.device: ...
    def token_losses(self, tokens_BL: Tensor, labels_BL: Tensor) -> Tensor: ...


class Texts(Protocol):
    """Sequences of length + 1 tokens."""

    length: int

    def __len__(self) -> int: ...
    def __getitem__(self, number: int) -> Tensor: ...


def batches(numbers: Sequence[int], length: int, batch_tokens: int) -> Iterator[Sequence[int]]:
    """Groups of as many sequences as fit into `batch_tokens`, at least one."""
    rows = max(1, batch_tokens // length)
    for start in range(0, len(numbers), rows):
        yield numbers[start : start + rows]


def sequence_losses(
    model: LossModel,
    texts: Texts,
    *,
    ranks: Ranks,
    batch_tokens: int,
    label: str = "",
) -> list[Tensor]:
    """The fp32 loss at every position of every sequence, on the CPU."""

    def share(numbers: Sequence[int]) -> list[Tensor]:
        losses: list[Tensor] = []
        bar = current_bar()
        bar.at(label)
        with torch.inference_mode():
            for group in batches(numbers, texts.length, batch_tokens):
                text = torch.stack([texts[number] for number in group])
                _check_tokens(text, model.spec.padded_vocab_size)
                text = text.to(model.device)
                losses.extend(model.token_losses(text[:, :-1], text[:, 1:]).float().cpu())
                bar.advance(text[:, 1:].numel() * ranks.size, texts.length)
        return losses

    return ranks.map(share, range(len(texts)))


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


# Log-probabilities of given continuations, from one forward pass per batch.

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


# One bar over everything that is evaluated, with the time that is left for all of it.
#
# Work is counted in the multiplications of a transformer layer: a token at length L costs about
# 12 x hidden_size for the matrices and L for attention, so the bar moves evenly over all lengths.

BAR = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
SECONDS_BETWEEN_LINES = 5.0


class TotalBar:
    """A bar on a terminal; elsewhere a line now and then. `total` 0 shows nothing."""

    def __init__(self, hidden_size: int = 1, total: float = 0.0, *, show: bool = False) -> None:
        self._hidden_size = hidden_size
        self._total, self._done = total, 0.0
        self._label = ""
        self._start = self._last_line = time.monotonic()
        self._show = show and total > 0
        terminal = sys.stderr.isatty()
        self._lines = self._show and not terminal
        self._bar = tqdm(
            total=total,
            bar_format=BAR,
            disable=not (self._show and terminal),
            dynamic_ncols=True,
            leave=False,  # what stays on the screen are the tables
        )

    def cost(self, tokens: int, length: int) -> float:
        """Work of `tokens` tokens in sequences of `length`."""
        return float(tokens) * (12 * self._hidden_size + length)

    def at(self, label: str) -> None:
        """What is being measured now."""
        self._label = label
        self._bar.set_description_str(label)
        self._say()

    def advance(self, tokens: int, length: int) -> None:
        self.move_to(self._done + self.cost(tokens, length))

    def move_to(self, done: float) -> None:
        """`done` of the total; data may turn out shorter than planned, or be measured already."""
        done = min(done, self._total)
        self._bar.update(done - self._done)
        self._done = done
        self._say()

    @property
    def done(self) -> float:
        return self._done

    def _say(self) -> None:
        now = time.monotonic()
        if not self._lines or not self._done or now - self._last_line < SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        left = (now - self._start) * (self._total - self._done) / self._done
        share = self._done / self._total
        print(f"{self._label}: {share:.0%}, about {left:.0f} s left", file=sys.stderr, flush=True)

    def close(self) -> None:
        self._bar.close()


_SILENT = TotalBar()
_CURRENT: ContextVar[TotalBar] = ContextVar("total_bar", default=_SILENT)


def current_bar() -> TotalBar:
    """The bar that is showing; one that shows nothing where there is none."""
    return _CURRENT.get()


@contextmanager
def showing(bar: TotalBar) -> Iterator[TotalBar]:
    """Make `bar` the current one while the block runs."""
    token = _CURRENT.set(bar)
    try:
        yield bar
    finally:
        _CURRENT.reset(token)
        bar.close()
