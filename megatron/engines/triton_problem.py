"""An attention call as the Triton kernels want it: layouts, dtypes, and what rows and keys share.

Everything here is tensors of O(length): nothing of the size of the scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.engines.triton_compat import next_power_of_2
from megatron.engines.triton_tables import NO_SCORE

__all__ = ["LOG2E", "Problem", "aligned", "build_problem", "strides"]

LOG2E = math.log2(math.e)
# rows are loaded 16 elements at a time, from addresses that are multiples of 16 bytes
ALIGNMENT = 16


@dataclass(frozen=True)
class Problem:
    """An attention call whose tensors are laid out as the kernels want them."""

    q: Tensor  # [B, H, Lq, D], D a multiple of 16
    k: Tensor  # [B, Hk, Lk, D], H a multiple of Hk
    v: Tensor
    bias: Tensor | None  # [H, >= Lk]
    weight: Tensor | None
    key_bias: Tensor | None  # [B or 1, H or 1, Lk] fp32
    own: Tensor | None  # the same shape, finite: what a query at that position subtracts
    first_key: Tensor | None  # [B, Lq] int32
    sink: Tensor | None  # [B or 1, H, Lq or 1] fp32, base 2, relative to `own`
    visible: Tensor  # [H] int32: distances worth visiting per head
    window: int
    scale: float
    arch: int = 80  # compute capability, times ten

    @property
    def head_dim(self) -> int:
        return int(self.q.shape[-1])

    @property
    def block_d(self) -> int:
        return max(32, next_power_of_2(self.head_dim))

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return int(self.q.shape[1] // self.k.shape[1])

    @property
    def offset(self) -> int:
        """Position of the first query."""
        return int(self.k.shape[2] - self.q.shape[2])


def build_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    key_bias: Tensor | None,
    first_key: Tensor | None,
    sink: Tensor | None,
    visible: Tensor | None,
    window: int,
    scale: float,
) -> Problem:
    """Lay out a call; tensors that already fit are not copied."""
    q, k, v = aligned(q), aligned(k), aligned(v)
    if visible is None:  # one more load in the kernels is cheaper than kernels of two kinds
        visible = torch.full((q.shape[1],), window, dtype=torch.int32, device=q.device)
    visible = visible.to(device=q.device, dtype=torch.int32).contiguous()
    if first_key is not None:
        first_key = first_key.to(torch.int32).contiguous()
        visible = visible.minimum(_longest_reach(first_key, k.shape[2]))
    own = None
    if key_bias is not None:
        key_bias = key_bias.detach().float().contiguous()
        own = own_references(key_bias)
    sinks = None if sink is None else _relative_sinks(sink, own, q.shape[2])
    return Problem(
        q, k, v, bias, weight, key_bias, own, first_key, sinks, visible, window, scale,
        architecture(q.device),
    )  # fmt: skip


def architecture(device: torch.device) -> int:
    """80 for an A100, 90 for an H100; 80 where there is no GPU."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def own_references(key_bias: Tensor) -> Tensor:
    """For each position the bias of its own key; of the last finite one before it, if any, at pads.

    Subtracting it from a row changes no probability, and keeps differences of large sums exact.
    """
    places = torch.arange(key_bias.shape[-1], device=key_bias.device)
    last = torch.where(key_bias.isfinite(), places, -1).cummax(-1).values
    return torch.where(last < 0, 0.0, key_bias.gather(-1, last.clamp(min=0)))


def _relative_sinks(sink: Tensor, own: Tensor | None, q_length: int) -> Tensor:
    sink = sink.detach().float()
    if sink.dim() == 1:
        sink = sink[None, :, None]
    if own is not None:
        sink = sink - own[..., own.shape[-1] - q_length :]
    return (sink * LOG2E).clamp(min=NO_SCORE).contiguous()


def _longest_reach(first_key: Tensor, k_length: int) -> Tensor:
    """The largest distance that any query sees, plus one: no band beyond it has an element."""
    q_length = first_key.shape[1]
    positions = torch.arange(
        k_length - q_length, k_length, dtype=torch.int32, device=first_key.device
    )
    return (positions - first_key).amax() + 1


def aligned(x: Tensor) -> Tensor:
    """x itself if the kernels can read its rows in whole vectors, else a contiguous copy."""
    steps = [x.stride(i) for i in range(3) if x.shape[i] > 1]
    good = x.stride(3) == 1 and all(step % ALIGNMENT == 0 for step in steps)
    # the kernels hold the offsets inside one tile in 32 bits
    small = all(step < 2**31 // 256 for step in steps[-1:])
    return x if good and small and x.data_ptr() % ALIGNMENT == 0 else x.contiguous().clone()


def strides(x: Tensor, axes: int = 3) -> tuple[int, ...]:
    """Strides of the first axes; 0 for an axis of one, which broadcasts and hinders nothing."""
    return tuple(x.stride(i) if x.shape[i] > 1 else 0 for i in range(axes))
