"""Attention written as plainly as possible, in float64, for autograd to differentiate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    query_features: Tensor | None = None,
    distance_features: Tensor | None = None,
    row_scale: Tensor | None = None,
    key_bias: Tensor | None = None,
    first_key: Tensor | None = None,
    sink: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    heads, q_len, k_len = q.shape[1], q.shape[2], k.shape[2]
    k, v = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    position = torch.arange(k_len)
    distance = position[k_len - q_len :, None] - position[None, :]
    visible = (distance >= 0)[None, None]
    if window is not None:
        visible = visible & (distance < window)
    if first_key is not None:
        visible = visible & (position >= first_key[:, None, :, None])
    scores = torch.einsum("bhid,bhjd->bhij", q.double(), k)
    scores = scores * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if weight is not None:
        scores = scores * weight.double()[:, distance.clamp(min=0)]
    if bias is not None:
        scores = scores + bias.double()[:, distance.clamp(min=0)]
    if query_features is not None:
        by_distance = query_features.double() @ distance_features.double()[..., :k_len]
        extent = by_distance.shape[-1]
        at = distance.clamp(0, extent - 1).expand(*scores.shape)
        near = (distance >= 0) & (distance < extent)
        scores = scores + by_distance.gather(-1, at) * near
    if key_bias is not None:
        scores = scores + key_bias.double()[:, :, None]
        visible = visible & (key_bias > -math.inf)[:, :, None]
    if row_scale is not None:
        scores = scores.nan_to_num(neginf=-1e300) * row_scale.double()[..., None]
    sees = visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~visible, -math.inf).masked_fill(~sees, 0.0)
    if sink is not None:
        column = sink.double()[:, None, None] if sink.dim() == 1 else sink.double()[..., None]
        scores = torch.cat([scores, column.expand(*scores.shape[:3], 1)], -1)
    probs = torch.softmax(scores, -1)[..., :k_len].masked_fill(~sees, 0.0)
    probs = probs if factors is None else probs * factors.double()  # of dropout
    return torch.einsum("bhij,bhjd->bhid", probs, v)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value, or over 1: some gradients are zero."""
    difference = (actual.detach().double() - expected.detach().double()).abs().max()
    return float(difference / expected.detach().double().abs().max().clamp(min=1.0))


@dataclass(frozen=True)
class Case:
    """A drawn attention call: tensors that require gradients, and the window."""

    tensors: tuple[Tensor | None, ...]
    window: int | None

    def output_and_gradients(self, attend: Callable[..., Tensor], seed: int = 1) -> list[Tensor]:
        """The output, then the gradients of q, k, v and the tables for a drawn output gradient."""
        wanted = [tensor for tensor in self.tensors if tensor is not None]
        out = attend(*self.tensors, window=self.window)
        generator = torch.Generator().manual_seed(seed)
        grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        return [out, *torch.autograd.grad(out, wanted, grad.to(out.dtype))]


def draw_case(
    batch: int,
    heads: int,
    q_len: int,
    k_len: int,
    dim: int,
    *,
    window: int | None = None,
    tables: str = "bias",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Normal q, k, v; a log bias and a decaying weight, both three distances longer than needed."""
    torch.manual_seed(seed)
    q = torch.randn(batch, heads, q_len, dim).to(dtype).requires_grad_()
    k = torch.randn(batch, heads, k_len, dim).to(dtype).requires_grad_()
    v = torch.randn(batch, heads, k_len, dim).to(dtype).requires_grad_()
    distance = torch.arange(k_len + 3)
    bias = -2 * torch.rand(heads, 1) * torch.log1p(torch.rand(heads, 1) * distance)
    weight = torch.exp(-torch.rand(heads, 1) * distance / k_len)
    return Case(
        (
            q,
            k,
            v,
            bias.requires_grad_() if "bias" in tables else None,
            weight.requires_grad_() if "weight" in tables else None,
        ),
        window,
    )
