"""Pruning by decay: which keys cannot change the float32 result, by an upper bound on their share.

A query's own key (distance 0) has score s0 and contributes exp(s0)|v0|. A key at distance d or
beyond scores at most `bias_after[d] + |q||k| scale weight_after[d]` (Cauchy-Schwarz; the `after`
tables are suffix maxima, so a table need not fall monotonically). Where that bound, plus
log(|v| / |v0|) if positive, lies below s0 by log(keys / epsilon), all such keys together add less
than epsilon = 2^-24 of the own key's share, to the weights and to the output: less than rounding
does. The same keys have no share in the backward beyond rounding.

A key bias adds to the bound what it is at most among those keys, and to s0 that of the own key; a
sink only makes every share smaller; hidden keys (first_key) are not needed anyway. Features add at
most |query features| |distance features| (in `bias_after`), and to s0 those of distance 0. A factor
of the scores stretches the gap between them: the least factor of the queries divides the margin.

The C++ engine applies the bound per block of queries and block of keys; the PyTorch one per head,
as does the Triton engine with kernels of its own (triton_pruning).
Large q or k, or an outlier, only widen the bound: less is pruned, never wrongly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.engines.call import Call

EPSILON_LOG2 = 24.0
MIN_KEYS = 256  # shorter than this, hardly a block could be left out


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
    k_len = call.k_len
    if (call.bias is None and call.key_bias is None) or k_len < MIN_KEYS:
        return None
    margin_log2 = math.log2(k_len) + EPSILON_LOG2
    bias = torch.zeros_like(call.k[0, 0, :, 0], dtype=torch.float32).expand(call.q.shape[1], -1)
    if call.bias is not None:
        bias = call.bias.detach()[:, :k_len].float()
    bias = bias + largest_features(call)
    deepest = (bias[:, 0] - bias.amin(1)).max()
    if call.key_bias is not None:
        deepest = deepest + _deepest_key_bias(call.key_bias.detach())
    if call.row_scale is not None:
        deepest = deepest * call.row_scale.detach().amax()
    if not deepest * math.log2(math.e) > margin_log2:
        return None
    weight_after = None
    if call.weight is not None:
        weight_after = _suffix_max(call.weight.detach()[:, :k_len].float().abs())
    return DecayBounds(_suffix_max(bias), weight_after, margin_log2)


def _deepest_key_bias(key_bias: Tensor) -> Tensor:
    """How far a key's bias lies below that of a later one, at most."""
    # -inf (padding) minus -inf is NaN, and nothing to prune
    return (key_bias - key_bias.cummin(-1).values).nan_to_num(nan=0.0).amax()


def largest_features(call: Call) -> Tensor:
    """What query features times distance features may add at each distance, [heads, keys]."""
    if call.query_features is None or call.distance_features is None:
        return torch.zeros((), device=call.q.device)
    query = _norm(call.query_features.detach().float()).amax((0, 2))
    distance = _norm(call.distance_features.detach().float()[..., : call.k_len].mT)
    distance = torch.nn.functional.pad(distance, (0, call.k_len - distance.shape[-1]))
    return query[:, None] * distance


def _suffix_max(table: Tensor) -> Tensor:
    return table.flip(-1).cummax(-1).values.flip(-1)


@torch.no_grad()
def head_windows(call: Call, bounds: DecayBounds) -> Tensor:
    """For each head, how many of the nearest keys its queries need, [heads]."""
    q_BHLD, k_BHLD, v_BHLD = call.q.float(), call.k.float(), call.v.float()
    own = slice(call.offset, None)
    group = call.heads_per_key_head
    q_BKgLD = q_BHLD.unflatten(1, (-1, group))
    own_score_BHL = (q_BKgLD * k_BHLD[:, :, None, own]).sum(-1).flatten(1, 2) * call.scale
    if call.weight is not None:
        own_score_BHL = own_score_BHL * call.weight[:, :1].float()
    if call.bias is not None:
        own_score_BHL = own_score_BHL + call.bias[:, :1].float()
    if call.query_features is not None and call.distance_features is not None:
        own_features = call.distance_features[..., 0].float()[:, None]
        own_score_BHL = own_score_BHL + (call.query_features.float() * own_features).sum(-1)
    if call.key_bias is not None:
        # At worst, a key has the largest bias so far; with rising biases that is the own key's.
        so_far = call.key_bias.float().cummax(-1).values - call.key_bias.float()
        own_score_BHL = own_score_BHL - so_far[:, :, own]
    least_own = own_score_BHL.amin((0, 2))
    # A key counts in the sum of the weights whatever its value, hence the clamp at equal values.
    value, own_value = _norm(v_BHLD).amax((0, 2)), _norm(v_BHLD[:, :, own]).amin((0, 2))
    values = (value / own_value).log().clamp(min=0.0).repeat_interleave(group)
    largest_key = _norm(k_BHLD).amax((0, 2)).repeat_interleave(group)
    product = _norm(q_BHLD).amax((0, 2)) * largest_key * abs(call.scale)
    reach = product[:, None] * (1.0 if bounds.weight_after is None else bounds.weight_after)
    slack = 0.01 + 1e-5 * (reach + least_own[:, None].abs())
    most = bounds.bias_after + reach + slack
    gap = values + bounds.margin_log2 * math.log(2.0)
    if call.row_scale is not None:
        gap = gap / call.row_scale.float().amin((0, 2))
    negligible = most < (least_own - gap)[:, None]
    # Both suffix maxima fall with distance, so the negligible distances are a tail.
    return (~negligible).sum(1).clamp(min=1)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1)
