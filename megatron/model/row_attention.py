"""Attention whose bias depends on the query's position too: FIRE beyond its threshold.

Up to the threshold the bias is a table over distance, and any engine computes it. Each query beyond
has a table of its own: those rows go through the dense engine some at a time, and are computed
again in the backward pass, so that memory stays O(length). Exact, and slower.

Shapes: B batch, H heads, L length (q: Lq), D head dimension.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.engines import attention
from megatron.engines.call import checked_call
from megatron.engines.reference import naive_attention
from megatron.model.content_positions import Fire, RowBias

LARGEST_BLOCK = 2**22
"""Numbers in the largest tensor of a block of rows."""


def attention_by_rows(
    rows: RowBias,
    positions_BL: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: None = None,
    weight: None = None,
    *,
    engine: str,
    **options: Any,
) -> Tensor:
    """`attention` with this bias for queries at these positions; the other arguments are its own.

    A method has tables or a bias by rows, never both.
    """
    length = q.shape[2]
    first = _first_beyond(rows, positions_BL)
    parts = []
    if first:
        tensors, others = _part(q, k, v, 0, first, options)
        table = rows.table(tensors[1].shape[2])
        parts.append(attention(*tensors, table, engine=engine, **others))
    widest = max(Fire.width * positions_BL.shape[0], q.shape[0] * q.shape[1])
    step = max(1, LARGEST_BLOCK // (widest * k.shape[2]))
    for start in range(first, length, step):
        stop = min(start + step, length)
        block = partial(_block, rows, positions_BL[:, start:stop], start, stop, options)
        if torch.is_grad_enabled():
            kept = checkpoint(block, q, k, v, use_reentrant=False, preserve_rng_state=False)
            parts.append(kept)
        else:
            parts.append(block(q, k, v))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _first_beyond(rows: RowBias, positions_BL: Tensor) -> int:
    """The first query at a position beyond the threshold in any row; none on device meta."""
    beyond = (positions_BL > rows.threshold.detach()).any(0)
    if beyond.is_meta or not bool(beyond.any()):
        return len(beyond)
    return int(beyond.int().argmax())


def _block(
    rows: RowBias,
    positions_BL: Tensor,
    start: int,
    stop: int,
    options: dict[str, Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """The queries from start to stop, all their scores at once."""
    tensors, others = _part(q, k, v, start, stop, options)
    place = torch.arange(tensors[1].shape[2], device=q.device)
    bias = rows.dense(place[start - stop :, None] - place, positions_BL)
    call = checked_call(*tensors, **others)
    return naive_attention(call, bias.expand(q.shape[0], -1, -1, -1))


def _part(
    q: Tensor, k: Tensor, v: Tensor, start: int, stop: int, options: dict[str, Any]
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """q, k, v and the other arguments of attention for the queries from start to stop."""
    keys = k.shape[2] - (q.shape[2] - stop)
    others = dict(options)
    for name in ("first_key", "row_scale"):
        if others.get(name) is not None:
            others[name] = others[name][..., start:stop]
    if others.get("key_bias") is not None:
        others["key_bias"] = others["key_bias"][..., :keys]
    if others.get("sink") is not None and others["sink"].dim() == 3:
        others["sink"] = others["sink"][..., start:stop]
    return (q[:, :, start:stop], k[:, :, :keys], v[:, :, :keys]), others
