"""How far back a layer can see whatever the text: the keys beyond need not stay in a cache.

A layer's input is normalised, so that its weights bound its queries and keys. A LayerNorm or
RMSNorm gives n with |n| <= sqrt(h), times a scale g, plus a bias b. A head's query is then at most

    |q| <= sqrt(h) |W diag(g)| + |W b + bias of W|          (|.| of a matrix: its spectral norm)

and no score is above S = |q| |k| scale or below -S. A key at distance d has the weight
exp(score - largest score) before it is normalised. The query's own key is one of the scores, so
the weight is at most exp(bias[d] - bias[0] + 2 S), which fp32 rounds to 0 below exp(-104). Where
the bias falls with every step, all farther keys have the weight 0 too: without them, the output is
the same sum without its zeros.

Only kernels that fall as a power of the distance reach that depth at lengths that occur. log(1 + d)
would need r1 > 9 at 100,000 tokens, and T5's bias or rotary positions never do.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron.model.layer_formulas import RMSNorm
from megatron.model.position_base import Tables
from megatron.model.positional_embeddings import (
    Alibi,
    AlibiFloored,
    AlibiLearned,
    Bam,
    KerplePower,
)

if TYPE_CHECKING:
    from megatron.model.attention import SelfAttention

FALLING = (Alibi, AlibiFloored, AlibiLearned, Bam, KerplePower)
"""Kernels whose bias falls with every step of distance, without end."""
HORIZON = 65_536  # distances that are looked at
_PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)  # whose softmax is of fp32
_ZERO = 104.0  # exp(-104) is below half of the smallest fp32 number


@torch.no_grad()
def layer_reach(norm: nn.Module | None, attention: SelfAttention, tables: Tables) -> int | None:
    """How many of the nearest keys may have a weight other than 0; None if no bound is known.

    `tables`: the layer's own, of a kernel in `FALLING`, over `HORIZON` distances.
    """
    if tables.bias is None or tables.weight is not None or not _is_plain(attention):
        return None
    bound = _largest_score(norm, attention)
    if bound is None:
        return None
    fallen = tables.bias - tables.bias[:, :1]
    slack = 0.01 + 1e-5 * (fallen.abs() + bound[:, None])
    reach = int((fallen + slack >= -(_ZERO + 2 * bound[:, None])).sum(1).max())
    return reach if reach < tables.bias.shape[1] else None


def _is_plain(attention: SelfAttention) -> bool:
    """Whether its scores are q k + bias, of whole heads and without a norm of q and k."""
    others = (
        *(attention.rotary, attention.qk_layernorm, attention.q_norm, attention.terms),
        *(attention.forget_gate, attention.softmax_scale, attention.temperature),
    )
    return all(x is None for x in others) and attention.tp.size == attention.sp.size == 1


def _largest_score(norm: nn.Module | None, attention: SelfAttention) -> Tensor | None:
    """The largest |q k| scale of each query head, [heads]."""
    linear = attention.query_key_value
    if type(norm) not in (nn.LayerNorm, RMSNorm) or linear.weight.dtype not in _PRECISIONS:
        return None
    scale: Tensor | None = getattr(norm, "scale" if isinstance(norm, RMSNorm) else "weight")
    shift: Tensor | None = getattr(norm, "bias", None)
    hidden, width, group = linear.weight.shape[1], attention.head_dim, attention.queries_per_key
    weight = linear.weight.float()
    rest = weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.float()
    if shift is not None:
        rest = rest + weight @ shift.float()
    if scale is not None:
        weight = weight * scale.float()
    # In a projection's own order of rows: its layout is read by the code that splits its output.
    rows_q, rows_k, _ = attention._heads(torch.cat([weight, rest[:, None]], 1).T[None])
    # Rounding: of the norm, the product (hidden terms) and the scores, in the weights' precision.
    epsilon = torch.finfo(linear.weight.dtype).eps
    slack = 1 + 8 * epsilon + hidden * math.sqrt(width) * torch.finfo(torch.float32).eps
    q, k = (slack * _largest_norm(rows[0]) for rows in (rows_q, rows_k))
    return q * k.repeat_interleave(group) / math.sqrt(width)


def _largest_norm(rows: Tensor) -> Tensor:
    """Of W n + rest over |n| <= sqrt(h), [heads]; rows [heads, h + 1, width], the last `rest`."""
    matrix, rest = rows[:, :-1], rows[:, -1]
    largest = torch.linalg.eigvalsh(matrix.mT @ matrix)[:, -1].clamp(min=0).sqrt()
    return math.sqrt(matrix.shape[1]) * 1.001 * largest + rest.norm(dim=-1)
