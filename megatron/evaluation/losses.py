"""Losses of many sequences, in batches, shared by all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from megatron.evaluation.errors import EvaluationError
from megatron.evaluation.ranks import Ranks
from megatron.model.spec import ModelSpec

__all__ = ["LossModel", "batches", "mean_and_error", "perplexity", "sequence_losses", "windowed"]


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
    last: int | None = None,
) -> list[Tensor]:
    """The fp32 loss at every position (or the `last` ones) of every sequence, on the CPU."""

    def share(numbers: Sequence[int]) -> list[Tensor]:
        losses: list[Tensor] = []
        bar = tqdm(total=len(numbers), desc=label, unit="seq", disable=not ranks.is_main)
        with bar, torch.inference_mode():
            for group in batches(numbers, texts.length, batch_tokens):
                text = torch.stack([texts[number] for number in group])
                _check_tokens(text, model.spec.padded_vocab_size)
                text = text.to(model.device)
                found = model.token_losses(text[:, :-1], text[:, 1:]).float().cpu()
                losses.extend(found if last is None else found[:, -last:])
                bar.update(len(group))
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


class Windowed(Protocol):
    def set_window(self, window: int | None) -> None: ...


@contextmanager
def windowed(model: Windowed, window: int | None, usual: int | None) -> Iterator[None]:
    """The model with attention limited to `window` distances, and as it was afterwards."""
    if window is None:
        yield
        return
    model.set_window(window)
    try:
        yield
    finally:
        model.set_window(usual)
