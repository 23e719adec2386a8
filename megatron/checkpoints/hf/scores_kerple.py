"""Attention scores with tables over distance, for Hugging Face: torch only.

Shape suffixes: B batch, H heads, Q queries, K keys, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Without gradients, score matrices larger than this many elements are made in blocks of queries.
LARGEST_SCORES = 2**25
Tables = tuple[Tensor | None, Tensor | None]


class Scores:
    """What is done to q.k before the softmax: weights, biases, the causal and the padding mask."""

    def __init__(
        self, tables: Tables, past: int | Tensor, queries: int, keys: int, window: int | None,
        allowed: Tensor | None, device: torch.device, heads: int = 1,
        positions: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.tables, self.window, self.allowed = tables, window, allowed
        self.queries, self.keys = queries, keys
        self.heads = heads  # how many have scores of their own, whatever the tables
        self.q_index = past + torch.arange(queries, device=device)
        self.k_index = torch.arange(keys, device=device)
        # of the queries, [B or 1, Q], without padding
        self.positions = self.q_index[None] if positions is None else positions

    def replaced(self, **changes: Any) -> Scores:
        """The same geometry for another kernel (`tables`), or another `window`."""
        copy = Scores.__new__(Scores)
        copy.__dict__.update(self.__dict__, **changes)
        return copy

    def dense(self, start: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor | None]:
        """Additive bias [B or 1, H or 1, Q, K] in fp32 and factor [1, H, Q, K] of some queries."""
        distance = self.q_index[start:stop, None] - self.k_index
        visible = self._visible(distance, slice(start, stop))
        index = distance.clamp(min=0)
        bias, weight = (None if table is None else table[:, index][None] for table in self.tables)
        lowest = torch.finfo(torch.float32).min  # not -inf: a row of padding sees nothing at all
        zero = torch.zeros((), device=distance.device) if bias is None else bias
        return torch.where(visible, zero, lowest), weight

    def _visible(self, distance: Tensor, queries: slice) -> Tensor:
        visible = distance >= 0
        if self.window is not None:
            visible = visible & (distance < self.window)
        visible = visible[None, None]
        if self.allowed is not None:
            rows = queries if self.allowed.shape[2] > 1 else slice(None)
            visible = visible & self.allowed[:, :, rows]
        return visible

    def keys_seen(self) -> Tensor:
        """How many keys each query sees, [B or 1, Q]; 1 where there is nothing but padding."""
        if self.allowed is None:
            n = self.q_index[None] + 1
            return n if self.window is None else n.clamp(max=self.window)
        if self.allowed.shape[2] > 1:
            distance = self.q_index[:, None] - self.k_index
            return self._visible(distance, slice(None)).sum(-1)[:, 0].clamp(min=1)
        so_far = F.pad(self.allowed[:, 0, 0].long().cumsum(-1), (1, 0))
        n = so_far[:, self.q_index + 1]
        if self.window is not None:
            n = n - so_far[:, (self.q_index + 1 - self.window).clamp(min=0)]
        return n.clamp(min=1)


def decay(sums: Tensor, q_index: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
    """What forget gates add to the scores of some queries, [B, H, Q, K]: c_m - c_n."""
    own = sums[:, :, q_index[start:stop]]
    return (own[..., None] - sums[:, :, None]).float()


def features_by_distance(
    features: Tensor, table: Tensor, scores: Scores, start: int = 0, stop: int | None = None
) -> Tensor:
    """Features of some queries [B, H, Q, R] times those of distances [1, R, E]: [B, H, Q, K]."""
    by_distance = features[:, :, start:stop].float() @ table.float()
    distance = scores.q_index[start:stop, None] - scores.k_index
    index = distance.clamp(0, table.shape[-1] - 1).expand(*by_distance.shape[:2], -1, -1)
    near = (distance >= 0) & (distance < table.shape[-1])
    return by_distance.gather(-1, index).masked_fill(~near, 0.0)


def content_bias(
    scores: Scores, sums: Tensor | None, features: Tensor | None, table: Tensor | None,
    row_bias: Any = None, start: int = 0, stop: int | None = None,
) -> Tensor | None:  # fmt: skip
    """What a layer's terms (see ScoreTerms) add to the scores of some queries; None if nothing."""
    bias = None if sums is None else decay(sums, scores.q_index, start, stop)
    if row_bias is not None:
        distance = scores.q_index[start:stop, None] - scores.k_index
        by_row = row_bias.dense(distance, scores.positions[:, start:stop])
        bias = by_row if bias is None else bias + by_row
    if features is None or table is None:
        return bias
    more = features_by_distance(features, table, scores, start, stop)
    return more if bias is None else bias + more


def scaled_rows(bias: Tensor, row_scale: Tensor | None, start: int, stop: int | None) -> Tensor:
    """A bias times the factor [B or 1, H or 1, Q] of some queries; what is masked stays as low."""
    if row_scale is None:
        return bias
    scaled = bias * row_scale[:, :, start:stop, None]
    return scaled.clamp(min=torch.finfo(torch.float32).min)


def append_gates_to_keys(k: Tensor, gates: Tensor) -> Tensor:
    """Keys with gates [B, H, Q] in further columns, so that any cache of keys keeps them too.

    Every key head carries the gates of its query heads, as the bits of fp32 numbers: in 16-bit
    keys a gate takes two columns.
    """
    own = gates.detach().float().unflatten(1, (k.shape[1], -1)).transpose(2, 3).contiguous()
    narrow = k.dtype.itemsize < own.dtype.itemsize
    return torch.cat((k, own.view(k.dtype) if narrow else own.to(k.dtype)), -1)


def split_gates_from_keys(k: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """The keys alone, and the gates that were beside them, [B, H, K] in fp32."""
    keys, beside = k[..., :head_dim], k[..., head_dim:]
    narrow = k.dtype.itemsize < torch.float32.itemsize
    own = beside.contiguous().view(torch.float32) if narrow else beside.float()
    return keys, own.transpose(2, 3).flatten(1, 2)


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, weight: Tensor | None,
    dropout: float, eager: bool, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention output [B, H, Q, D] and, where they exist, the probabilities."""
    if sinks is not None:  # a key and a value of zeros whose bias is the sink
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        bias = bias.expand(-1, q.shape[1], -1, -1)
        column = sinks.float()[:, None, None].expand(*bias.shape[:3], 1)
        bias = torch.cat((bias, column), -1)
        weight = None if weight is None else F.pad(weight, (0, 1))
        out, probabilities = attend(q, k, v, bias, weight, dropout, eager)
        return out, None if probabilities is None else probabilities[..., :-1]
    scale = q.shape[-1] ** -0.5
    if not eager and weight is None:  # a factor on the scores cannot be written as a mask
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale
        )
        return out, None
    scores = (q @ k.transpose(-2, -1) * scale).float()
    scores = scores + bias if weight is None else scores * weight + bias
    probabilities = scores.softmax(-1).to(q.dtype)
    return F.dropout(probabilities, dropout) @ v, probabilities


def attend_in_blocks(
    run: Callable[..., tuple[Tensor, Tensor | None]], q: Tensor, k: Tensor, v: Tensor,
    scores: Scores, added: Callable[[int, int], Tensor | None], row_scale: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`run` (attend) for so many queries at a time that their scores are not too many.

    `added` gives what the text adds to the scores of such a block.
    """
    rows = max(1, LARGEST_SCORES // (q.shape[0] * q.shape[1] * scores.keys))
    blocks = []
    for start in range(0, q.shape[2], rows):
        bias, weight = scores.dense(start, start + rows)
        more = added(start, start + rows)
        bias = bias if more is None else bias + more
        bias = scaled_rows(bias, row_scale, start, start + rows)
        blocks.append(run(q[:, :, start : start + rows], k, v, bias, weight))
    parts = [part for _, part in blocks if part is not None]
    probabilities = torch.cat(parts, dim=2) if keep and parts else None
    return torch.cat([block for block, _ in blocks], dim=2), probabilities


def fits_at_once(x: Tensor, scores: Scores) -> bool:
    """Whether to make the score matrix in one piece: small, or needed for gradients."""
    tables = [table.shape[0] for table in scores.tables if table is not None]
    heads = max(scores.heads, *tables) if tables else scores.heads
    return torch.is_grad_enabled() or (
        x.shape[0] * heads * scores.queries * scores.keys <= LARGEST_SCORES
    )


def absolute_positions(
    position_ids: Tensor | None, attention_mask: Tensor | None, past: int | Tensor, x: Tensor
) -> Tensor:
    """Absolute positions, not counting padding on the left."""
    if position_ids is not None:
        return position_ids
    if attention_mask is not None and attention_mask.dim() == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -x.shape[1] :]
    return (past + torch.arange(x.shape[1], device=x.device)).unsqueeze(0)


def cache_capacity(cache: Any) -> int | None:
    """The number of keys a cache of fixed size hands out; None where it grows as needed."""
    if not getattr(cache, "layers", True):  # empty still, and growing
        return None
    # the method's name in transformers, and in 5.0
    ask = getattr(cache, "get_max_length", None) or getattr(cache, "get_max_cache_shape", None)
    capacity = ask() if ask is not None else None
    return capacity if isinstance(capacity, int) and capacity > 0 else None


def allowed_keys(attention_mask: Tensor | None, keys: int) -> Tensor | None:
    """Which keys a query may see besides the causal rule: [B, 1, 1 or Q, K], boolean."""
    if attention_mask is None:
        return None
    if attention_mask.dim() == 2:
        padded = F.pad(attention_mask.bool(), (0, keys - attention_mask.shape[1]), value=True)
        return None if bool(padded.all()) else padded[:, None, None]
    if attention_mask.dtype == torch.bool:
        return attention_mask[..., :keys]
    return attention_mask[..., :keys] >= 0
