"""Self-attention with tables over distance, whichever kernel made them.

Shape suffixes: B batch, L length, H heads (of this rank), D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from einops import rearrange
from torch import Tensor, nn

from megatron.engines import attention
from megatron.model.cache import LayerCache, row_starts
from megatron.model.content_positions import LayerTerms, ScoreTerms
from megatron.model.embedding import positions_in_documents
from megatron.model.layer_formulas import (
    RMSNorm,
    gate_sums,
    keys_seen,
    log_gates,
    normed_heads,
    sharpened,
    temperatures,
)
from megatron.model.position_base import Tables, at_least_fp32
from megatron.model.rotary_and_input_positions import RotaryEmbedding
from megatron.model.row_attention import attention_by_rows
from megatron.mpu.collectives import (
    WHOLE,
    SequenceParallel,
    TensorParallel,
    copy_to_group,
    heads_to_positions,
    positions_to_heads,
)
from megatron.mpu.parallel_layers import ColumnParallelLinear, Projections, per_head_parameter


def _dropout_seed(tp: TensorParallel) -> Tensor:
    """The seed of this layer's attention dropout, in this forward pass.

    Drawn from the default CPU generator, which is equal on all tensor-parallel ranks, plus the
    rank: heads on different ranks get different masks, a recomputed activation gets the same mask
    again, and only torch's own RNG state need be saved.
    """
    return torch.randint(2**62, (), dtype=torch.int64) + tp.rank


class SelfAttention(nn.Module):
    """Projections around the one attention function.

    `per_head` tells where the numbers of `layer_formulas.PER_HEAD` start. `temperature` is the
    floor and alpha of attention_temperature. `documents_apart`: a token sees its own document only;
    `positions_restart`: rotary positions are those that `starts` tell. With `sp`, the input is
    this rank's part of the positions; between the projections it has all positions of its share
    of the heads.
    """

    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    sinks: nn.Parameter | None
    softmax_scale: nn.Parameter | None
    observer: Callable[[Callable[..., Tensor]], Callable[..., Tensor]] | None = None
    """What replaces the attention function by one that also looks at its weights."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        linear: Projections,
        rotary: RotaryEmbedding | None,
        qk_norm: nn.Module | None,
        own_norms: tuple[RMSNorm, RMSNorm] | None = None,
        qkv_bias: bool | None = None,
        forget_gate: bool,
        terms: LayerTerms | None,
        per_head: Mapping[str, float | None],
        temperature: tuple[int, float] | None,
        documents_apart: bool,
        positions_restart: bool,
        dropout: float,
        window: int | None,
        engine: str,
        pruning: bool,
        sp: SequenceParallel = WHOLE,
    ) -> None:
        super().__init__()
        self.tp, self.sp = linear.tp, sp
        tp = linear.tp
        tp.slice_of(num_heads, "num_attention_heads")  # whole heads only
        tp.slice_of(kv_heads, "num_kv_heads")
        if num_heads % kv_heads:
            raise ValueError(f"{num_heads} heads cannot share {kv_heads} heads of keys and values")
        self.head_dim = head_dim
        self.queries_per_key = num_heads // kv_heads
        self.dropout, self.window = dropout, window
        self.temperature = temperature
        self.engine, self.pruning = engine, pruning
        self.documents_apart, self.positions_restart = documents_apart, positions_restart
        self.rotary, self.qk_layernorm, self.terms = rotary, qk_norm, terms
        self.q_norm, self.k_norm = own_norms or (None, None)
        self.shares_input = forget_gate or terms is not None
        query_size, key_size = num_heads * head_dim, kv_heads * head_dim
        self.query_key_value = linear.column(
            "attention.query_key_value",
            hidden_size,
            query_size + 2 * key_size,
            # GPT-NeoX: q, k, v of one head after another, but all q, all k, all v of grouped heads
            parts=(query_size, key_size, key_size) if self.queries_per_key > 1 else (),
            bias=qkv_bias,
            input_is_shared=self.shares_input,
        )
        self.forget_gate: ColumnParallelLinear | None = None
        if forget_gate:  # as its authors: drawn as every matrix, a bias that starts at 0
            self.forget_gate = linear.column(
                "attention.forget_gate", hidden_size, num_heads, bias=True, input_is_shared=True
            )
        for name, start in per_head.items():
            number = None if start is None else per_head_parameter(start, num_heads, tp)
            self.register_parameter(name, number)
        self.dense = linear.row("attention.dense", query_size, hidden_size)

    def own_flops(self, length: int) -> float:
        """Of q k^T and of its product with v, for one token among `length`, without projections.

        A causal query sees half of the sequence on average, or of its window until that is full.
        """
        reach = min(length, self.window or length)
        keys = reach - reach**2 / (2 * length)
        return 4.0 * keys * self.dense.weight.shape[1]

    def forward(
        self,
        x_BLh: Tensor,
        tables: Tables,
        cache: LayerCache | None = None,
        starts_BL: Tensor | None = None,
    ) -> Tensor:
        """Attention of every token; `starts` tells where the document of each position begins.

        Rows of a cache may begin at places of their own, as documents do.
        """
        if self.shares_input:
            x_BLh = copy_to_group(x_BLh, self.tp)
        offset = cache.length if cache is not None else 0
        rows_BL = None if cache is None else row_starts(cache.starts, x_BLh.shape[1])
        if rows_BL is not None:
            starts_BL = rows_BL
        local = self._heads(self.query_key_value(x_BLh))
        q_BHLD, k_BHLD, v_BHLD = (positions_to_heads(x, self.sp) for x in local)
        restart = self.positions_restart or rows_BL is not None
        places = positions_in_documents(starts_BL, offset) if restart else None
        if self.rotary is not None:
            q_BHLD, k_BHLD = self.rotary(q_BHLD, k_BHLD, offset, offset, places)
        first_key = starts_BL if self.documents_apart or rows_BL is not None else None
        if self.softmax_scale is not None:
            n_BL = self._keys_seen(x_BLh, offset, first_key)
            q_BHLD = sharpened(q_BHLD, self.sp.own(self.softmax_scale, 0), n_BL)
        terms = self._terms(x_BLh, offset, starts_BL, first_key)
        documents_BL = first_key if rows_BL is None else None  # a cache has the sums of its rows
        key_bias, sink = self._gates_and_sinks(x_BLh, terms, cache, documents_BL)
        if cache is not None:
            k_BHLD, v_BHLD = cache.append(k_BHLD, v_BHLD)
            if rows_BL is not None:  # counted from the first key that the cache still has
                first_key = (rows_BL - cache.length + k_BHLD.shape[2]).clamp(min=0)
        dropout = self.dropout if self.training else 0.0
        attend: Callable[..., Tensor] = attention
        if terms.row_bias is not None:
            if places is None:
                places = keys_seen(q_BHLD.shape[2], offset=offset, device=x_BLh.device) - 1
            attend = partial(attention_by_rows, terms.row_bias, places)
        if self.observer is not None:
            attend = self.observer(attend)
        out_BHLD = attend(
            q_BHLD,
            k_BHLD,
            v_BHLD,
            *(None if x is None else self.sp.own(x, 0) for x in (tables.bias, tables.weight)),
            key_bias=key_bias,
            first_key=first_key,
            sink=sink,
            query_features=terms.query_features,
            distance_features=terms.distance_features,
            row_scale=terms.row_scale,
            window=self.window,
            dropout=dropout,
            engine=self.engine,
            pruning=self.pruning,
            seed=_dropout_seed(self.tp) if dropout else None,
        )
        out_BHLD = heads_to_positions(out_BHLD, self.sp)
        return self.dense(rearrange(out_BHLD, "b h l d -> b l (h d)"))

    def _keys_seen(self, x_BLh: Tensor, offset: int, starts_BL: Tensor | None) -> Tensor:
        return keys_seen(
            x_BLh.shape[1] * self.sp.size,
            offset=offset,
            window=self.window,
            starts_BL=starts_BL,
            device=x_BLh.device,
        )

    def _terms(
        self, x_BLh: Tensor, offset: int, starts_BL: Tensor | None, first_key: Tensor | None
    ) -> ScoreTerms:
        """What the input and the positions say about the scores."""
        queries, device = x_BLh.shape[1] * self.sp.size, x_BLh.device
        terms = ScoreTerms()
        if self.terms is not None:
            seen = self._keys_seen(x_BLh, offset, first_key)
            terms = self.terms(x_BLh, offset + queries, self.sp.own(seen))
            by_position = {"query_features", "log_gates", "row_scale"}
            terms = terms._replace(
                **{
                    name: positions_to_heads(term, self.sp)
                    for name, term in terms._asdict().items()
                    if name in by_position and term is not None
                }
            )
        if terms.distance_features is not None:  # of all heads, whole on every rank
            table = copy_to_group(terms.distance_features, self.tp)
            terms = terms._replace(distance_features=table)
        if terms.row_bias is not None:
            rows = terms.row_bias.of_heads(
                partial(copy_to_group, tp=self.tp), partial(self.sp.own, dim=0)
            )
            terms = terms._replace(row_bias=rows)
        if self.temperature is not None:
            n_BL = keys_seen(queries, offset=offset, starts_BL=starts_BL, device=device)
            factor = temperatures(n_BL, *self.temperature)
            both = factor if terms.row_scale is None else factor * terms.row_scale
            terms = terms._replace(row_scale=both)
        return terms

    def _gates_and_sinks(
        self,
        x_BLh: Tensor,
        terms: ScoreTerms,
        cache: LayerCache | None,
        starts_BL: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """What is added to each key's scores [B, H, keys], and the sinks, [H] or [B, H, queries].

        The gates' term is c_m - c_n, times the row's scale; c_m, constant over a row, cancels in
        the softmax and is left out. A sink does not have it, so it is subtracted there.
        """
        sink = None if self.sinks is None else at_least_fp32(self.sp.own(self.sinks, 0))
        gates, row_scale = terms.log_gates, terms.row_scale
        if self.forget_gate is not None:
            forgotten = positions_to_heads(log_gates(self.forget_gate(x_BLh)), self.sp)
            gates = forgotten if gates is None else gates + forgotten
        if gates is None:
            return None, sink
        sums = gate_sums(gates, None if cache is None else cache.gate_sum, starts_BL)
        dtype = torch.promote_types(x_BLh.dtype, torch.float32)
        if sink is not None:
            own = sums if row_scale is None else sums * row_scale
            sink = (sink[:, None] - own).to(dtype)
        if cache is not None:
            sums = cache.append_gates(sums)
        return -sums.to(dtype), sink

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [B, H, L, D]; the last two may have fewer heads."""
        if self.queries_per_key == 1:
            q_BLHD, k_BLHD, v_BLHD = rearrange(
                qkv, "b l (h three d) -> three b l h d", three=3, d=self.head_dim
            ).unbind()
        else:
            size = qkv.shape[-1] // (self.queries_per_key + 2)
            parts = qkv.split([self.queries_per_key * size, size, size], dim=-1)
            q_BLHD, k_BLHD, v_BLHD = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        if self.qk_layernorm is not None:
            if self.queries_per_key > 1:  # the norm has a weight for each query head
                k_BLHD, v_BLHD = (
                    part.repeat_interleave(self.queries_per_key, dim=2) for part in (k_BLHD, v_BLHD)
                )
            q_BLHD, k_BLHD = self.qk_layernorm(q_BLHD), self.qk_layernorm(k_BLHD)
        if self.q_norm is not None and self.k_norm is not None:
            # Each rank normalises its heads with the same weight: their gradients are summed.
            scales = (copy_to_group(norm.scale, self.tp) for norm in (self.q_norm, self.k_norm))
            q_BLHD = normed_heads(self.q_norm, q_BLHD, next(scales))
            k_BLHD = normed_heads(self.k_norm, k_BLHD, next(scales))
        return q_BLHD.transpose(1, 2), k_BLHD.transpose(1, 2), v_BLHD.transpose(1, 2)
