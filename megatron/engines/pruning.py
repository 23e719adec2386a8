"""Pruning by decay: which keys cannot change the float32 result, by a true bound.

A query's own key (distance 0) has score s0 and contributes exp(s0)|v0|. A key at distance d or
beyond scores at most `bias_after[d] + |q||k| scale weight_after[d]` (Cauchy-Schwarz; the `after`
tables are suffix maxima, so a table need not fall monotonically). Where that bound, plus
log(|v| / |v0|) if positive, lies below s0 by log(keys / epsilon), all such keys together add less
than epsilon = 2^-24 of the own key's share, to the weights and to the output: less than rounding
does. The same keys have no share in the backward beyond rounding.

The C++ engine applies the bound per block of queries and block of keys; the PyTorch one per head.
Large q or k, or an outlier, only widen the bound: less is pruned, never wrongly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.engines.call import Call

__all__ = ["DecayBounds", "TileCount", "decay_bounds", "head_windows", "visible_keys"]

_EPSILON_LOG2 = 24.0
_MIN_KEYS = 256  # shorter than this, hardly a block could be left out


@dataclass(frozen=True)
class TileCount:
    """Blocks of scores that causality and the window leave, and those that were computed."""

    total: int
    visited: int

    @property
    def share(self) -> float:
        return self.visited / self.total


@dataclass(frozen=True)
class DecayBounds:
    """Suffix maxima of the tables, [heads, keys], and the log2(keys / epsilon) to stay below."""

    bias_after: Tensor
    weight_after: Tensor | None
    margin_log2: float


def decay_bounds(call: Call) -> DecayBounds | None:
    """Bounds for pruning, or None where no head's bias falls far enough for it to help."""
    bias, weight, k_len = call.bias, call.weight, call.k_len
    if bias is None or k_len < _MIN_KEYS:
        return None
    margin_log2 = math.log2(k_len) + _EPSILON_LOG2
    used = bias.detach()[:, :k_len].float()
    # On GPU the look at the numbers would wait for the device; bounds that do not help are cheap.
    if not bias.is_cuda:
        deepest = (used[:, 0] - used.amin(1)).max()
        if not deepest * math.log2(math.e) > margin_log2:
            return None
    weight_after = None if weight is None else _suffix_max(weight.detach()[:, :k_len].float().abs())
    return DecayBounds(_suffix_max(used), weight_after, margin_log2)


def _suffix_max(table: Tensor) -> Tensor:
    return table.flip(-1).cummax(-1).values.flip(-1)


@torch.no_grad()
def head_windows(call: Call, bounds: DecayBounds) -> Tensor:
    """For each head, how many of the nearest keys its queries need, [heads]."""
    q_BHLD, k_BHLD, v_BHLD = call.q.float(), call.k.float(), call.v.float()
    own = slice(call.k_len - call.q_len, None)
    own_k, own_v = k_BHLD[:, :, own], v_BHLD[:, :, own]
    own_score_BHL = (q_BHLD * own_k).sum(-1) * call.scale
    if call.weight is not None:
        own_score_BHL = own_score_BHL * call.weight[:, :1].float()
    if call.bias is not None:
        own_score_BHL = own_score_BHL + call.bias[:, :1].float()
    least_own = own_score_BHL.amin((0, 2))
    # A key counts in the sum of the weights whatever its value, hence the clamp at equal values.
    values = (_norm(v_BHLD).amax((0, 2)) / _norm(own_v).amin((0, 2))).log().clamp(min=0.0)
    product = _norm(q_BHLD).amax((0, 2)) * _norm(k_BHLD).amax((0, 2)) * abs(call.scale)
    reach = product[:, None] * (1.0 if bounds.weight_after is None else bounds.weight_after)
    slack = 0.01 + 1e-5 * (reach + least_own[:, None].abs())
    most = bounds.bias_after + reach + values[:, None] + slack
    negligible = most < least_own[:, None] - bounds.margin_log2 * math.log(2.0)
    # Both suffix maxima fall with distance, so the negligible distances are a tail.
    return (~negligible).sum(1).clamp(min=1)


def visible_keys(call: Call) -> Tensor | None:
    """`head_windows` as int32; None where pruning cannot help."""
    bounds = decay_bounds(call)
    return None if bounds is None else head_windows(call, bounds).int()


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1)
