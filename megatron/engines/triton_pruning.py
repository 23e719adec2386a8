"""Pruning by decay on a GPU: per head, the distances that can change the result at all.

The bound is that of pruning.py. What differs is the cost: a look at the numbers makes the host wait
for the GPU, and a dozen small launches cost more than the attention they prune. So the host looks
at each table once (tables are computed once per step and shared by all layers): two entries per
head say whether any head can decay below rounding within the reach. Where none can, nothing is
launched. Where one can, one pass over q, k and v finds the norms, and one over the tables the
distances; the host does not wait for either.

A key bias adds to the bound what an earlier key may have over the query's own. A sink takes from
all keys alike, documents always hold the query's own key: neither weakens the bound.
"""

# Triton reads the kernels' signatures; their run-time arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, name-defined"

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron.engines.triton_compat import Launch, cdiv, device_of, jit, next_power_of_2, tl
from megatron.engines.triton_forward import load_rows
from megatron.engines.triton_problem import aligned, strides

__all__ = ["can_decay", "visible_distances"]

_EPSILON_LOG2 = 24.0
_MIN_KEYS = 256  # shorter than this, hardly a block could be left out
_ROWS = 64
_DISTANCES = 1024

# table -> (version, reach, answer); a table that is gone is forgotten
_decided: Any = WeakIdKeyDictionary()


def _margin(k_length: int) -> float:
    """How far below the own key's score all keys of a row together vanish in rounding."""
    return (math.log2(k_length) + _EPSILON_LOG2) * math.log(2.0)


def can_decay(bias: Tensor, reach: int) -> bool:
    """True if some head's bias falls far enough within `reach` distances for pruning to help.

    Waits for the GPU once for each new table.
    """
    kept = _decided.get(bias)
    if kept is None or kept[:2] != (bias._version, reach):
        fall = (bias.detach()[:, 0] - bias.detach()[:, reach - 1]).float().max()
        kept = (bias._version, reach, bool(fall > _margin(reach)))
        _decided[bias] = kept
    return bool(kept[2])


@jit(do_not_specialize=["heads", "group", "q_length", "k_length"])
def norms_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,  # [batch * heads, blocks, 8] fp32
    q_stride_b, q_stride_h, q_stride_l,
    k_stride_b, k_stride_h, k_stride_l,
    v_stride_b, v_stride_h, v_stride_l,
    heads,
    group,
    q_length,
    k_length,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Over one block of positions: the largest |q|, |k|, |v|, the least own |v| and own q.k."""
    start = tl.program_id(0) * ROWS
    batch_head = tl.program_id(1)
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    key_head = head // group
    offset = k_length - q_length
    positions = start + tl.arange(0, ROWS)
    is_query = (positions >= offset) & (positions < k_length)
    k_base = k_ptr + batch * k_stride_b + key_head * k_stride_h
    v_base = v_ptr + batch * v_stride_b + key_head * v_stride_h
    q_base = q_ptr + batch * q_stride_b + head * q_stride_h
    k = load_rows(k_base, start, k_length, k_stride_l, ROWS, HEAD_DIM, BLOCK_D).to(tl.float32)
    v = load_rows(v_base, start, k_length, v_stride_l, ROWS, HEAD_DIM, BLOCK_D).to(tl.float32)
    dims = tl.arange(0, BLOCK_D)
    q_rows = (positions - offset).to(tl.int64)[:, None] * q_stride_l
    mask = is_query[:, None] & (dims[None, :] < HEAD_DIM)
    q = tl.load(q_base + q_rows + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    k_norm = tl.sqrt(tl.sum(k * k, 1))
    v_norm = tl.sqrt(tl.sum(v * v, 1))
    q_norm = tl.sqrt(tl.sum(q * q, 1))
    own = tl.sum(q * k, 1)
    line = out_ptr + (batch_head.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * 8
    tl.store(line, tl.max(q_norm, 0))
    tl.store(line + 1, tl.max(k_norm, 0))
    tl.store(line + 2, tl.max(v_norm, 0))
    # minima as maxima of the opposite, so that one reduction follows
    tl.store(line + 3, tl.max(tl.where(is_query, -v_norm, float("-inf")), 0))
    tl.store(line + 4, tl.max(tl.where(is_query, -own, float("-inf")), 0))
    tl.store(line + 5, tl.max(tl.where(is_query, own, float("-inf")), 0))


@jit(do_not_specialize=["reach", "scale", "margin", "bias_stride", "weight_stride"])
def distances_kernel(
    bias_ptr,
    weight_ptr,
    norms_ptr,  # [heads, 8]
    extra_ptr,  # [heads]: what an earlier key's bias may have over the own key's; or None
    visible_ptr,
    bias_stride,
    weight_stride,
    reach,
    scale,
    margin,
    HAS_WEIGHT: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head: the last distance at which a key can matter, plus one."""
    head = tl.program_id(0)
    norms = norms_ptr + head * 8
    product = tl.load(norms) * tl.load(norms + 1) * tl.abs(scale)
    # a key counts in the sum of the weights whatever its value, hence not below equal values
    values = tl.maximum(tl.log(tl.load(norms + 2) / -tl.load(norms + 3)), 0.0)
    least = tl.where(scale >= 0, -tl.load(norms + 4), tl.load(norms + 5)) * scale
    if HAS_WEIGHT:
        first = tl.load(weight_ptr + head * weight_stride).to(tl.float32)
        least = tl.where(scale * first >= 0, -tl.load(norms + 4), tl.load(norms + 5))
        least = least * scale * first
    least += tl.load(bias_ptr + head * bias_stride).to(tl.float32)
    if HAS_EXTRA:
        values += tl.load(extra_ptr + head)
    last = tl.zeros([BLOCK], tl.int32)
    for start in range(0, reach, BLOCK):
        distance = start + tl.arange(0, BLOCK)
        mask = distance < reach
        most = tl.load(bias_ptr + head * bias_stride + distance, mask=mask, other=float("-inf"))
        most = most.to(tl.float32)
        bound = tl.full([BLOCK], 1.0, tl.float32) * product
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + head * weight_stride + distance, mask=mask, other=0.0)
            bound = product * tl.abs(weight.to(tl.float32))
        slack = 0.01 + 1e-5 * (bound + tl.abs(least))
        # a NaN is not negligible
        negligible = most + bound + values + slack < least - margin
        last = tl.where(mask & ~negligible, distance + 1, last)
    tl.store(visible_ptr + head, tl.maximum(tl.max(last, 0), 1))


def _excess(key_bias: Tensor, q_length: int, heads: int) -> Tensor:
    """For each head, the most that any key's bias exceeds that of a later query's own key."""
    own = key_bias.detach().float()
    above = torch.where(own.isfinite(), own.cummax(-1).values - own, math.inf)
    most = above[..., own.shape[-1] - q_length :].amax((0, 2))
    return most.expand(heads).contiguous()


def pruning_launches(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    weight: Tensor | None,
    key_bias: Tensor | None,
    reach: int,
    scale: float,
) -> tuple[Launch, Launch, Tensor, Tensor, Tensor]:
    """(launch, launch, partial norms, norms, visible): reduce partial to norms in between."""
    q, k, v = (aligned(x.detach()) for x in (q, k, v))
    batch, heads, q_length, head_dim = q.shape
    k_length = k.shape[2]
    blocks = cdiv(k_length, _ROWS)
    partial = torch.zeros(batch, heads, blocks, 8, dtype=torch.float32, device=q.device)
    norms = partial.new_empty(heads, 8)
    visible = torch.empty(heads, dtype=torch.int32, device=q.device)
    arguments = (
        q, k, v, partial, *strides(q), *strides(k), *strides(v),
        heads, heads // k.shape[1], q_length, k_length,
    )  # fmt: skip
    options = {"HEAD_DIM": head_dim, "BLOCK_D": max(16, next_power_of_2(head_dim)), "ROWS": _ROWS}
    common = {"num_warps": 4, "enable_fp_fusion": True}
    first = Launch(norms_kernel, (blocks, batch * heads), arguments, options | common)
    extra = None if key_bias is None else _excess(key_bias, q_length, heads)
    tables = [None if x is None else x.detach().contiguous() for x in (bias, weight)]
    steps = [0 if x is None else x.stride(0) for x in tables]
    arguments = (*tables, norms, extra, visible, *steps, reach, scale, _margin(k_length))
    options = {
        "HAS_WEIGHT": weight is not None,
        "HAS_EXTRA": extra is not None,
        "BLOCK": _DISTANCES,
    }
    second = Launch(distances_kernel, (heads,), arguments, options | common)
    return first, second, partial, norms, visible


@torch.no_grad()
def visible_distances(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    weight: Tensor | None = None,
    key_bias: Tensor | None = None,
    *,
    window: int | None = None,
    scale: float,
) -> Tensor | None:
    """Per head the distances worth visiting, int32 [heads]; None where pruning cannot help."""
    k_length = k.shape[2]
    reach = k_length if window is None else min(window, k_length)
    if bias is None or reach < _MIN_KEYS or not can_decay(bias, reach):
        return None
    first, second, partial, norms, visible = pruning_launches(
        q, k, v, bias, weight, key_bias, reach, scale
    )
    with device_of(q):
        first.run()
        torch.amax(partial, (0, 2), out=norms)
        second.run()
    return visible
