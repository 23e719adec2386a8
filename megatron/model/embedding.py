"""The model's two ends at the vocabulary: tokens to vectors; vectors to logits and losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.model.rotary_and_input_positions import InputEmbedding
from megatron.mpu.collectives import (
    SERIAL,
    TensorParallel,
    copy_to_group,
    gather_from_group,
    vocab_parallel_cross_entropy,
)
from megatron.mpu.parallel_layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

State = Tensor | tuple[Tensor, ...]
"""What travels between layers, see transformer.py."""


class Embedding(nn.Module):
    """Token embeddings, plus positions for the embeddings that change the input."""

    def __init__(
        self,
        word_embeddings: VocabParallelEmbedding,
        position_embeddings: InputEmbedding | None = None,
        dropout: float = 0.0,
        *,
        positions_restart: bool = False,
    ) -> None:
        super().__init__()
        self.word_embeddings = word_embeddings
        self.position_embeddings = position_embeddings
        self.dropout = dropout
        self.positions_restart = positions_restart

    def forward(self, inputs: State, offset: int = 0) -> State:
        """Hidden states of tokens; where documents start (see transformer.py) is handed on."""
        tokens, starts = (inputs, None) if isinstance(inputs, Tensor) else inputs
        x = self.word_embeddings(tokens)
        if self.position_embeddings is not None:
            places = places_in_documents(starts) if self.positions_restart else None
            # a method of the user's own need not know `positions`
            own = () if places is None else (places,)
            x = self.position_embeddings(x, offset, *own)
        if self.dropout:
            x = F.dropout(x, self.dropout, self.training)
        return x if starts is None else (x, starts)


def places_in_documents(starts_BL: Tensor | None) -> Tensor | None:
    """Each token's place in its document, if it is known where documents start."""
    if starts_BL is None:
        return None
    return torch.arange(starts_BL.shape[1], device=starts_BL.device) - starts_BL


class FinalNorm(nn.Module):
    """The norm before the head, under GPT-NeoX's name."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


# The heads: logits of hidden states; `vocab_tp` says over which ranks their vocabulary is split.


class UntiedHead(nn.Module):
    """A projection of its own, split by vocabulary ("column") or by hidden size ("row").

    As the last layer of a pipeline it passes the hidden states on (`in_loss`): the loss applies
    it to some tokens at a time.
    """

    def __init__(
        self, final_linear: ColumnParallelLinear | RowParallelLinear, *, in_loss: bool = False
    ) -> None:
        super().__init__()
        self.in_loss = in_loss
        self.final_linear = final_linear
        split_by_vocabulary = isinstance(final_linear, ColumnParallelLinear)
        self.vocab_tp = final_linear.tp if split_by_vocabulary else SERIAL

    def forward(self, x: Tensor) -> Tensor:
        return x if self.in_loss else self.logits(x)

    def logits(self, x: Tensor) -> Tensor:
        return self.final_linear(x)


class TiedHead(nn.Module):
    """The token embedding used again; it holds no parameters of its own."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self._borrowed = [embedding]  # in a list, so that the parameters are not registered twice
        self.vocab_tp = embedding.word_embeddings.tp

    @property
    def embedding(self) -> Embedding:
        return self._borrowed[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)

    def logits(self, x: Tensor) -> Tensor:
        words = self.embedding.word_embeddings
        return F.linear(copy_to_group(x, words.tp), words.weight)


Head = TiedHead | UntiedHead

full_logits = gather_from_group
"""All ranks' parts of the vocabulary, from logits and their head's `vocab_tp`."""


# The loss of hidden states, without ever holding the logits of all tokens.
#
# At 16,384 tokens and 50,304 words the logits are 3.3 GB in fp32, and their gradient as much again.
# So the head is applied to some tokens at a time; with gradients each piece is computed again in
# the backward pass. Small heads are applied at once, which is quicker.

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


def masked_mean(losses: Tensor, mask: Tensor) -> Tensor:
    """The mean loss of the tokens that count."""
    mask = mask.to(losses.dtype)
    return (losses * mask).sum() / mask.sum().clamp(min=1.0)
