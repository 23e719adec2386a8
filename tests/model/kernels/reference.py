"""Attention written as plainly as possible, in float64, for autograd to differentiate."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    q_len, k_len = q.shape[2], k.shape[2]
    position = torch.arange(k_len)
    distance = position[k_len - q_len :, None] - position[None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    scores = torch.einsum("bhid,bhjd->bhij", q.double(), k.double())
    scores = scores * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if weight is not None:
        scores = scores * weight.double()[:, distance.clamp(min=0)]
    if bias is not None:
        scores = scores + bias.double()[:, distance.clamp(min=0)]
    probs = torch.softmax(scores.masked_fill(~visible, -math.inf), -1)
    return torch.einsum("bhij,bhjd->bhid", probs, v.double())


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value."""
    difference = (actual.detach().double() - expected.detach().double()).abs().max()
    return float(difference / expected.detach().double().abs().max().clamp(min=1e-30))
