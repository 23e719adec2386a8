"""Pruning by decay on a GPU: per head, the distances that can change the result at all.

The bound is that of pruning.py. What differs is the cost: reading a value makes the host wait for
the GPU, and a dozen small launches cost more than the attention they prune. So the host reads each
table once (tables are computed once per step and shared by all layers): two entries per head decide
whether any head can decay below rounding within the reach. Where none can, nothing is
launched. Where one can, one pass over q, k and v finds the norms, and one over the tables the
distances; the host does not wait for either.

A key bias adds to the bound what an earlier key may have over the query's own, features what they
may have at a distance over theirs of the own key. A row scale divides the margin. A sink takes from
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

from megatron.engines.call import Call
from megatron.engines.pruning import EPSILON_LOG2, MIN_KEYS, largest_features
from megatron.engines.triton_forward import head_of_program, line_of, load_tile
from megatron.engines.triton_problem import aligned, rows_of
from megatron.engines.triton_runtime import Launch, cdiv, jit, next_power_of_2, run_on, tl

_ROWS = 64
_DISTANCES = 1024

# table -> (version, reach, answer); a table that is gone is forgotten
_decided: Any = WeakIdKeyDictionary()


def _margin(k_length: int) -> float:
    """How far below the own key's score all keys of a row together vanish in rounding."""
    return (math.log2(k_length) + EPSILON_LOG2) * math.log(2.0)


def can_decay(bias: Tensor, reach: int) -> bool:
    """True if some head's bias falls far enough within `reach` distances for pruning to help.

    Waits for the GPU once for each new table.
    """
    # Tables of torch.inference_mode count no versions; an old answer costs time, never numbers.
    version = None if bias.is_inference() else bias._version
    kept = _decided.get(bias)
    if kept is None or kept[:2] != (version, reach):
        fall = (bias.detach()[:, 0] - bias.detach()[:, reach - 1]).float().max()
        kept = (version, reach, bool(fall > _margin(reach)))
        _decided[bias] = kept
    return bool(kept[2])


@jit(do_not_specialize=["heads", "group", "q_length", "k_length"])
def norms_kernel(
    q, k, v,  # Rows
    out_ptr,  # [batch * heads, blocks, 8] fp32
    heads, group, q_length, k_length,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Over one block of positions: the largest |q|, |k|, |v|, the least own |v| and own q.k."""
    start = tl.program_id(0) * ROWS
    batch, head = head_of_program()
    offset = k_length - q_length
    positions = start + tl.arange(0, ROWS)
    is_query = (positions >= offset) & (positions < k_length)
    k_line = line_of(k, batch, head // group, k_length)
    v_line = line_of(v, batch, head // group, k_length)
    q_line = line_of(q, batch, head, q_length)
    k_tile = load_tile(k_line, start, ROWS, HEAD_DIM, BLOCK_D).to(tl.float32)
    v_tile = load_tile(v_line, start, ROWS, HEAD_DIM, BLOCK_D).to(tl.float32)
    dims = tl.arange(0, BLOCK_D)
    q_rows = (positions - offset).to(tl.int64)[:, None] * q_line.row
    mask = is_query[:, None] & (dims[None, :] < HEAD_DIM)
    q_tile = tl.load(q_line.ptr + q_rows + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    k_norm = tl.sqrt(tl.sum(k_tile * k_tile, 1))
    v_norm = tl.sqrt(tl.sum(v_tile * v_tile, 1))
    q_norm = tl.sqrt(tl.sum(q_tile * q_tile, 1))
    own = tl.sum(q_tile * k_tile, 1)
    line = out_ptr + ((batch * heads + head) * tl.num_programs(0) + tl.program_id(0)) * 8
    tl.store(line, tl.max(q_norm, 0))
    tl.store(line + 1, tl.max(k_norm, 0))
    tl.store(line + 2, tl.max(v_norm, 0))
    # minima as maxima of the opposite, so that one reduction follows
    tl.store(line + 3, tl.max(tl.where(is_query, -v_norm, float("-inf")), 0))
    tl.store(line + 4, tl.max(tl.where(is_query, -own, float("-inf")), 0))
    tl.store(line + 5, tl.max(tl.where(is_query, own, float("-inf")), 0))


@jit(do_not_specialize=["reach", "scale", "margin", "bias_stride", "weight_stride"])
def distances_kernel(
    bias_ptr, weight_ptr,
    norms_ptr,  # [heads, 8]
    extra_ptr,  # [heads]: what an earlier key may have over the own one by other terms; or None
    scale_ptr,  # [heads]: the least row scale; or None
    visible_ptr,
    bias_stride, weight_stride, reach, scale, margin,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One head: the last distance at which a key can matter, plus one."""
    head = tl.program_id(0)
    norms = norms_ptr + head * 8
    product = tl.load(norms) * tl.load(norms + 1) * tl.abs(scale)
    # a key counts in the sum of the weights whatever its value, hence not below equal values
    values = tl.maximum(tl.log(tl.load(norms + 2) / -tl.load(norms + 3)), 0.0)
    least = tl.where(scale >= 0, -tl.load(norms + 4), tl.load(norms + 5)) * scale
    if weight_ptr is not None:
        first = tl.load(weight_ptr + head * weight_stride).to(tl.float32)
        least = tl.where(scale * first >= 0, -tl.load(norms + 4), tl.load(norms + 5))
        least = least * scale * first
    least += tl.load(bias_ptr + head * bias_stride).to(tl.float32)
    if scale_ptr is not None:  # the row scale multiplies the gap between two scores
        values /= tl.load(scale_ptr + head)
        margin /= tl.load(scale_ptr + head)
    if extra_ptr is not None:
        values += tl.load(extra_ptr + head)
    last = tl.zeros([BLOCK], tl.int32)
    for start in range(0, reach, BLOCK):
        distance = start + tl.arange(0, BLOCK)
        mask = distance < reach
        most = tl.load(bias_ptr + head * bias_stride + distance, mask=mask, other=float("-inf"))
        most = most.to(tl.float32)
        bound = tl.full([BLOCK], 1.0, tl.float32) * product
        if weight_ptr is not None:
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


def _feature_bounds(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """The bias with the most that features add at a distance; how much less they are at 0, [H]."""
    if call.bias is None or call.query_features is None or call.distance_features is None:
        return call.bias, None
    most = largest_features(call)
    own = call.query_features.float() * call.distance_features[..., 0].float()[:, None]
    bias = call.bias[:, : call.k_len].float() + most
    return bias, most[:, 0] - own.sum(-1).amin((0, 2))


def _is_capturing() -> bool:
    """True while a CUDA graph is recorded: the host must not synchronise then."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@torch.no_grad()
def visible_distances(call: Call) -> Tensor | None:
    """Per head the distances worth visiting, int32 [heads]; None where pruning cannot help."""
    if call.bias is None or call.reach < MIN_KEYS or _is_capturing():
        return None
    if not can_decay(call.bias, call.reach):
        return None
    q, k, v = (aligned(x.detach()) for x in (call.q, call.k, call.v))
    batch, heads, q_length, head_dim = q.shape
    blocks = cdiv(call.k_len, _ROWS)
    partial = torch.zeros(batch, heads, blocks, 8, dtype=torch.float32, device=q.device)
    rows = (rows_of(x) for x in (q, k, v))
    arguments = (*rows, partial, heads, call.heads_per_key_head, q_length, call.k_len)
    options = {"HEAD_DIM": head_dim, "BLOCK_D": max(16, next_power_of_2(head_dim)), "ROWS": _ROWS}
    # with fused multiply-adds the lanes that hold one sum would disagree in its last bit
    options |= {"num_warps": 4, "enable_fp_fusion": False}
    run_on(q, Launch(norms_kernel, (blocks, heads, batch), arguments, options))
    norms = partial.amax((0, 2))
    visible = torch.empty(heads, dtype=torch.int32, device=q.device)
    bias, extra = _feature_bounds(call)
    if call.key_bias is not None:
        excess = _excess(call.key_bias, q_length, heads)
        extra = excess if extra is None else extra + excess
    least = None
    if call.row_scale is not None:
        least = call.row_scale.detach().float().amin((0, 2)).expand(heads).contiguous()
    tables = [None if x is None else x.detach().contiguous() for x in (bias, call.weight)]
    steps = [0 if x is None else x.stride(0) for x in tables]
    bound = (call.reach, call.scale, _margin(call.k_len))
    arguments = (*tables, norms, extra, least, visible, *steps, *bound)
    options = {"BLOCK": _DISTANCES, "num_warps": 4, "enable_fp_fusion": True}
    run_on(q, Launch(distances_kernel, (heads,), arguments, options))
    return visible
