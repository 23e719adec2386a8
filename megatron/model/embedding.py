"""Embedding and head: tokens to vectors, vectors to logits."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.backends.interface import full_shape
from megatron.model.rotary_and_input_positions import InputEmbedding
from megatron.mpu.collectives import (
    SERIAL,
    WHOLE,
    SequenceParallel,
    copy_to_group,
    gather_from_group,
)
from megatron.mpu.parallel_layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

State = Tensor | tuple[Tensor, ...]
"""The activations passed between layers, see transformer.py."""

# A layer's `hf_names`: how its parameters' names begin, and what a Hugging Face file has instead.
# {number} counts transformer layers from 0, {head} is what a type of model calls its head.


class Embedding(nn.Module):
    """Token embeddings, plus positions for the embeddings that change the input."""

    hf_names: ClassVar = {
        "word_embeddings.": "gpt_neox.embed_in.",
        "position_embeddings.": "gpt_neox.embed_positions.",
    }

    def __init__(
        self,
        word_embeddings: VocabParallelEmbedding,
        position_embeddings: InputEmbedding | None = None,
        dropout: float = 0.0,
        *,
        positions_restart: bool = False,
        sp: SequenceParallel = WHOLE,
    ) -> None:
        super().__init__()
        self.sp = sp
        self.word_embeddings = word_embeddings
        self.position_embeddings = position_embeddings
        self.dropout = dropout
        self.positions_restart = positions_restart

    def forward(self, inputs: State, offset: int = 0, rows: Tensor | None = None) -> State:
        """Hidden states of this rank's part of the tokens; document starts (see transformer.py),
        of all tokens, are passed on. `rows`: where the rows of a cache begin, [B, L]."""
        tokens, starts = (inputs, None) if isinstance(inputs, Tensor) else inputs
        x = self.word_embeddings(self.sp.own(tokens))
        if self.position_embeddings is not None:
            places = positions_in_documents(starts) if self.positions_restart else None
            if rows is not None:
                places = positions_in_documents(rows, offset)
            offset += self.sp.rank * x.shape[1]
            places = None if places is None else self.sp.own(places)
            # a user-defined method may not take `positions`
            own = () if places is None else (places,)
            x = self.position_embeddings(x, offset, *own)
        if self.dropout:
            x = F.dropout(x, self.dropout, self.training)
        return x if starts is None else (x, starts)


def positions_in_documents(starts_BL: Tensor | None, offset: int = 0) -> Tensor | None:
    """Each token's position in its document; None without document starts.

    The first token is the one at `offset`, from where starts are counted too.
    """
    if starts_BL is None:
        return None
    end = offset + starts_BL.shape[1]
    return torch.arange(offset, end, device=starts_BL.device) - starts_BL


class FinalNorm(nn.Module):
    """The norm before the head, under GPT-NeoX's name."""

    hf_names: ClassVar = {"norm.": "gpt_neox.final_layer_norm."}

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

    hf_names: ClassVar = {"final_linear.weight": "{head}"}

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

    def own_flops(self, length: int) -> float:
        """Of one token's product with the embedding's matrix, which only this layer multiplies."""
        return 2.0 * full_shape(self.embedding.word_embeddings.weight).numel()

    def logits(self, x: Tensor) -> Tensor:
        words = self.embedding.word_embeddings
        return F.linear(copy_to_group(x, words.tp), words.weight)


Head = TiedHead | UntiedHead

full_logits = gather_from_group
"""All ranks' parts of the vocabulary, from logits and their head's `vocab_tp`."""
