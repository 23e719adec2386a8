"""Attention scores with tables over distance, for Hugging Face: torch only.

Shape suffixes: B batch, H heads, Q queries, K keys, D head dimension.
"""

from __future__ import annotations

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
        allowed: Tensor | None, device: torch.device,
    ) -> None:  # fmt: skip
        self.tables, self.window, self.allowed = tables, window, allowed
        self.queries, self.keys = queries, keys
        self.q_index = past + torch.arange(queries, device=device)
        self.k_index = torch.arange(keys, device=device)

    def with_tables(self, tables: Tables) -> Scores:
        """The same geometry for another kernel."""
        copy = Scores.__new__(Scores)
        copy.__dict__.update(self.__dict__, tables=tables)
        return copy

    def dense(self, start: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor | None]:
        """Additive bias [B or 1, H or 1, Q, K] in fp32 and factor [1, H, Q, K] of some queries."""
        distance = self.q_index[start:stop, None] - self.k_index
        visible = distance >= 0
        if self.window is not None:
            visible = visible & (distance < self.window)
        visible = visible[None, None]
        if self.allowed is not None:
            rows = slice(start, stop) if self.allowed.shape[2] > 1 else slice(None)
            visible = visible & self.allowed[:, :, rows]
        index = distance.clamp(min=0)
        bias, weight = (None if table is None else table[:, index][None] for table in self.tables)
        lowest = torch.finfo(torch.float32).min  # not -inf: a row of padding sees nothing at all
        zero = torch.zeros((), device=distance.device) if bias is None else bias
        return torch.where(visible, zero, lowest), weight


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, weight: Tensor | None,
    dropout: float, eager: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention output [B, H, Q, D] and, where they exist, the probabilities."""
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


def fits_at_once(x: Tensor, scores: Scores) -> bool:
    """Whether to make the score matrix in one piece: small, or needed for gradients."""
    heads = max((table.shape[0] for table in scores.tables if table is not None), default=1)
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
    # the method's name in transformers 5, and in 4
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
