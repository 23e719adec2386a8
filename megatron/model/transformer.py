"""One transformer layer, and the activations passed between layers.

Layers pass the hidden states alone or a tuple `(hidden, [starts], *tables)`: the tables over
distance are computed once, by `PositionTables`, and passed with the hidden states, so that their
gradients return through any pipeline. `starts`, the only integers among them, are the first
position of each token's document, with reset_attention_mask or reset_position_ids; with
randomized_positions they are negative, so that place minus start is the drawn position. Where ranks
share sequences, hidden states are of a rank's own positions, starts and tables of all.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.attention import SelfAttention
from megatron.model.cache import LayerCache
from megatron.model.embedding import State
from megatron.model.layer_formulas import GATED, activation_named
from megatron.model.position_base import TableEmbedding, Tables
from megatron.model.reach import layer_reach
from megatron.mpu.collectives import WHOLE, SequenceParallel
from megatron.mpu.parallel_layers import Projections

TableNames = tuple[str | None, ...]
"""For each table that is passed on: what it is to a layer, None for a table of other layers."""


def pack(hidden: Tensor, starts: Tensor | None, *tables: Tables) -> State:
    """The activations for the next layer."""
    beside = (starts, *(table for kernel in tables for table in kernel))
    present = tuple(tensor for tensor in beside if tensor is not None)
    return (hidden, *present) if present else hidden


def unpack(state: State, table_names: TableNames) -> tuple[Tensor, Tensor | None, Tables]:
    """Hidden states, starts of documents, and the layer's own tables among those packed."""
    if isinstance(state, Tensor):
        return state, None, Tables()
    hidden, *tables = state
    starts = None
    if tables and not tables[0].is_floating_point():
        starts, *tables = tables
    named = {name: table for name, table in zip(table_names, tables, strict=True) if name}
    return hidden, starts, Tables(**named)


def drop_tables(state: State) -> Tensor:
    """The hidden states alone, after the last layer."""
    return state if isinstance(state, Tensor) else state[0]


class _EndTables(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *beside: Tensor) -> Tensor:
        ctx.save_for_backward(*beside)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        beside = (torch.zeros_like(t) if t.is_floating_point() else None for t in ctx.saved_tensors)
        return grads[0], *beside


def end_tables(state: State) -> Tensor:
    """`drop_tables` where layers differ: the last pipeline stage may use none of a kernel's tables,
    and DeepSpeed sends the gradient of every activation back. Theirs is 0."""
    return state if isinstance(state, Tensor) else _EndTables.apply(*state)


class PositionTables(nn.Module):
    """Holds the shared kernels and computes their tables once for all layers.

    One kernel is `embedding`; several, of a layer_pattern, are `embedding.0`, `embedding.1`, ...
    """

    hf_names: ClassVar = {"embedding.": "gpt_neox.positions."}

    def __init__(
        self, *embeddings: TableEmbedding, pipelined: bool = False, sp: SequenceParallel = WHOLE
    ) -> None:
        super().__init__()
        alone = len(embeddings) == 1
        self.embedding = embeddings[0] if alone else nn.ModuleList(embeddings)
        self.sp = sp
        self.pipelined = pipelined

    @property
    def embeddings(self) -> list[TableEmbedding]:
        """The kernels, in the order in which layers first use them."""
        found = self.embedding if isinstance(self.embedding, nn.ModuleList) else [self.embedding]
        return cast(list[TableEmbedding], list(found))

    def forward(self, state: State, offset: int = 0) -> State:
        hidden, starts, _ = unpack(state, ())
        length = offset + hidden.shape[1] * self.sp.size
        tables = [embedding(length) for embedding in self.embeddings]
        if self.pipelined:
            tables = [Tables(*map(_sendable, kernel)) for kernel in tables]
        return pack(hidden, starts, *tables)


def _sendable(table: Tensor | None) -> Tensor | None:
    """A table that DeepSpeed's pipeline can send: contiguous, and requiring a gradient.

    The pipeline sends a gradient for every float activation, also for tables that are not learned.
    """
    if table is None:
        return None
    table = table.contiguous()
    return table if table.requires_grad else table.detach().requires_grad_()


class TransformerLayer(nn.Module):
    """Attention and MLP, one after the other or (`parallel_residual`) side by side.

    Norms act on their inputs, or (`output_norm`) on their outputs.
    """

    hf_names: ClassVar = {"": "gpt_neox.layers.{number}."}

    def __init__(
        self,
        *,
        input_norm: nn.Module | None,
        attention: SelfAttention,
        mlp_norm: nn.Module | None,
        mlp: MLP,
        output_norm: nn.Module | None = None,
        table_names: TableNames = (),
        own_tables: TableEmbedding | None = None,
        table_factor: int = 1,
        hidden_dropout: float = 0.0,
        parallel_residual: bool = False,
    ) -> None:
        super().__init__()
        self.input_layernorm = input_norm
        self.attention = attention
        self.post_attention_layernorm = mlp_norm  # None: both branches share the input norm
        self.post_feedforward_layernorm = output_norm
        self.mlp = mlp
        self.positions, self.table_factor = own_tables, table_factor
        self.table_names = table_names
        self.hidden_dropout = hidden_dropout
        self.parallel_residual = parallel_residual

    def forward(self, state: State, cache: LayerCache | None = None) -> State:
        hidden, starts, tables = unpack(state, self.table_names)
        seen = cache.length if cache is not None else 0
        length = seen + hidden.shape[1] * self.attention.sp.size
        hidden = self._residual(hidden, self._tables(tables, length), cache, starts)
        return (hidden, *state[1:]) if isinstance(state, tuple) else hidden

    def reach(self, state: State, length: int) -> int | None:
        """How many of the nearest tokens can have a weight (reach.py); `state` has the tables."""
        tables = self._tables(unpack(state, self.table_names)[2], length)
        return layer_reach(self.input_layernorm, self.attention, tables)

    def _tables(self, tables: Tables, length: int) -> Tables:
        if self.positions is not None:
            tables = self.positions(length)
        if self.table_factor == 1 or tables.bias is None:
            return tables
        return Tables(self.table_factor * tables.bias, tables.weight)

    def _residual(
        self, x: Tensor, tables: Tables, cache: LayerCache | None, starts: Tensor | None
    ) -> Tensor:
        if self.input_layernorm is None:
            return self._residual_of_outputs(x, tables, cache, starts)
        normed = self.input_layernorm(x)
        attended = self._dropout(self.attention(normed, tables, cache, starts))
        if self.parallel_residual:
            if self.post_attention_layernorm is not None:
                normed = self.post_attention_layernorm(x)
            return x + attended + self._dropout(self.mlp(normed))
        x = x + attended
        assert self.post_attention_layernorm is not None
        return x + self._dropout(self.mlp(self.post_attention_layernorm(x)))

    def _residual_of_outputs(
        self, x: Tensor, tables: Tables, cache: LayerCache | None, starts: Tensor | None
    ) -> Tensor:
        assert self.post_attention_layernorm is not None
        assert self.post_feedforward_layernorm is not None
        attended = self.post_attention_layernorm(self.attention(x, tables, cache, starts))
        x = x + self._dropout(attended)
        return x + self._dropout(self.post_feedforward_layernorm(self.mlp(x)))

    def _dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.hidden_dropout, self.training) if self.hidden_dropout else x


# The feed-forward block.


class MLP(nn.Module):
    """h -> 4h -> h, or with a gate: half of the first projection multiplies the other."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, linear: Projections
    ) -> None:
        super().__init__()
        self.activation = activation_named(activation)
        parts = [intermediate_size] * (2 if activation in GATED else 1)
        self.dense_h_to_4h = linear.column(
            "mlp.dense_h_to_4h", hidden_size, sum(parts), parts=parts, neox="mlp.linear1"
        )
        self.dense_4h_to_h = linear.row(
            "mlp.dense_4h_to_h", intermediate_size, hidden_size, neox="mlp.linear2"
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.activation(self.dense_h_to_4h(x)))
