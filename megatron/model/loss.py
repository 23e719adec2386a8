"""The loss of hidden states, without ever holding the logits of all tokens.

At 16,384 tokens and 50,304 words the logits are 3.3 GB in fp32, and their gradient as much again.
So the head is applied to some tokens at a time; with gradients each piece is computed again in
the backward pass. Small heads are applied at once, which is quicker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.mpu.collectives import (
    WHOLE,
    SequenceParallel,
    TensorParallel,
    vocab_parallel_cross_entropy,
)

DEFAULT_LOSS_CHUNK = 1024
AT_ONCE = 2**26
"""Logits that training may hold at once: 256 MB in fp32."""

Logits = Callable[[Tensor], Tensor]


def loss_chunk(tokens: int, vocabulary: int) -> int | None:
    """How many tokens training takes at a time; None for all at once."""
    return None if tokens * vocabulary <= AT_ONCE else DEFAULT_LOSS_CHUNK


def head_losses(
    logits_of: Logits, hidden: Tensor, labels: Tensor, vocab_tp: TensorParallel, chunk: int | None
) -> Tensor:
    """The loss of each label, fp32; hidden is [*labels.shape, hidden size]."""

    def piece(h: Tensor, y: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(logits_of(h), y, vocab_tp)

    flat, targets = hidden.flatten(0, -2), labels.flatten()
    if chunk is None or flat.shape[0] <= chunk:
        return piece(flat, targets).view_as(labels)
    pieces = zip(flat.split(chunk), targets.split(chunk), strict=True)
    if torch.is_grad_enabled():
        losses = [cast(Tensor, checkpoint(piece, h, y, use_reentrant=False)) for h, y in pieces]
    else:
        losses = [piece(h, y) for h, y in pieces]
    return torch.cat(losses).view_as(labels)


def masked_mean(losses: Tensor, mask: Tensor, sp: SequenceParallel = WHOLE) -> Tensor:
    """The mean loss of the tokens that count.

    With ranks that share sequences, `losses` are of this rank's positions and `mask` is of all:
    the mean over the ranks of what each returns is the mean loss.
    """
    mask = mask.to(losses.dtype)
    return (losses * sp.own(mask)).sum() * sp.size / mask.sum().clamp(min=1.0)
