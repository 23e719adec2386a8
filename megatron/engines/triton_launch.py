"""What the Triton attention engine launches: tile sizes, padded tables, workspaces, arguments.

`forward_launch` and `backward_launches` only build `Launch` records. The engine runs them, and
tools/compile_triton.py compiles the very same records for GPUs that are not there, so what is
checked is what runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.engines.triton_backward import attention_backward_kernel, attention_delta_kernel
from megatron.engines.triton_compat import Launch, cdiv, next_power_of_2
from megatron.engines.triton_forward import attention_forward_kernel

__all__ = [
    "Problem",
    "Tiles",
    "backward_launches",
    "backward_tiles",
    "forward_launch",
    "forward_tiles",
    "split_count",
]

# Programs per multiprocessor that the backward asks for when it splits a head.
_PROGRAMS_PER_SM = 2
# The dQ workspace may grow to this many times the size of dQ in fp32, or to this many bytes.
_MAX_SPLITS_FREE = 4
_MAX_WORKSPACE_BYTES = 1 << 30


# lse and delta have rows padded to whole tiles, so that the backward loads them without a mask:
# the rows of every tile below divide this number, and those of a forward tile are the larger ones
_LSE_ROWS = 128


# fp32 products as three TF32 products on the tensor cores: close to fp32. No effect on bf16, fp16.
_FP32_PRODUCTS = "tf32x3"


@dataclass(frozen=True)
class Tiles:
    """Block sizes and compiler options of one kernel; `rows` are queries, `columns` keys.

    `slice_d`: how much of the head dimension a product over it takes at a time, where all of it
    would not fit in registers (see triton_forward).
    """

    rows: int
    columns: int
    warps: int
    stages: int
    slice_d: int | None = None


@dataclass(frozen=True)
class Problem:
    """An attention call whose tensors are laid out as the kernels want them (see `aligned`)."""

    q: Tensor  # [B, H, Lq, D], D a multiple of 16
    k: Tensor  # [B, H, Lk, D]
    v: Tensor
    bias: Tensor | None  # [H, >= Lk] fp32
    weight: Tensor | None
    visible: Tensor  # [H] int32: distances worth visiting per head
    window: int
    scale: float

    @property
    def head_dim(self) -> int:
        return int(self.q.shape[-1])

    @property
    def block_d(self) -> int:
        return max(32, next_power_of_2(self.head_dim))


# Keyed by (half precision, a weight table) and by the padded head dimension. Chosen so that no
# configuration spills registers on sm_80 or sm_90: `python tools/compile_triton.py` shows them.
_FORWARD: dict[tuple[bool, bool], dict[int, Tiles]] = {
    (True, False): {
        32: Tiles(128, 64, 8, 3),
        64: Tiles(128, 64, 8, 3),
        128: Tiles(64, 32, 4, 3),
        256: Tiles(64, 32, 8, 2),
    },
    (True, True): {
        32: Tiles(128, 64, 8, 2),
        64: Tiles(128, 64, 8, 2),
        128: Tiles(64, 32, 4, 2),
        256: Tiles(64, 32, 8, 2),
    },
    (False, False): {
        32: Tiles(64, 32, 8, 2),
        64: Tiles(64, 32, 8, 2),
        128: Tiles(32, 16, 8, 1),
        256: Tiles(32, 16, 8, 1, slice_d=64),
    },
    (False, True): {
        32: Tiles(64, 32, 8, 2),
        64: Tiles(64, 32, 8, 2),
        128: Tiles(32, 16, 8, 1),
        256: Tiles(32, 16, 8, 1, slice_d=64),
    },
}
# More keys than queries in a tile: dQ goes through memory once per tile, so wide is cheap.
_BACKWARD: dict[tuple[bool, bool], dict[int, Tiles]] = {
    (True, False): {
        32: Tiles(32, 64, 8, 2),
        64: Tiles(32, 64, 8, 2),
        128: Tiles(16, 64, 8, 2),
        256: Tiles(16, 32, 8, 1),
    },
    (True, True): {
        32: Tiles(16, 64, 8, 2),
        64: Tiles(16, 64, 8, 2),
        128: Tiles(16, 32, 8, 2),
        256: Tiles(16, 16, 8, 1),
    },
    (False, False): {
        32: Tiles(16, 32, 8, 1),
        64: Tiles(16, 32, 8, 1),
        128: Tiles(16, 16, 8, 1),
        256: Tiles(16, 16, 8, 1, slice_d=16),
    },
    (False, True): {
        32: Tiles(16, 32, 8, 1),
        64: Tiles(16, 32, 8, 1),
        128: Tiles(16, 16, 8, 1),
        256: Tiles(16, 16, 8, 1, slice_d=16),
    },
}


def forward_tiles(block_d: int, dtype: torch.dtype, weighted: bool) -> Tiles:
    return _FORWARD[dtype != torch.float32, weighted][block_d]


def backward_tiles(block_d: int, dtype: torch.dtype, weighted: bool) -> Tiles:
    """The keys of a tile are a whole number of times its queries (see triton_backward)."""
    return _BACKWARD[dtype != torch.float32, weighted][block_d]


def split_count(heads_and_batch: int, key_blocks: int, dq_bytes: int, processors: int) -> int:
    """How many programs share a head in the backward: enough to fill the GPU, within memory."""
    wanted = cdiv(_PROGRAMS_PER_SM * processors, heads_and_batch)
    affordable = max(_MAX_SPLITS_FREE, _MAX_WORKSPACE_BYTES // max(dq_bytes, 1))
    return max(1, min(wanted, affordable, key_blocks))


def padded_table(
    table: Tensor | None, used: int, length: int, pad: int, fill: float, factor: float
) -> Tensor | None:
    """fp32 [H, width]: `pad` fills, `table[:, :used] * factor`, then fills; width % 16 == 0."""
    if table is None:
        return None
    width = cdiv(length + 2 * pad, 16) * 16
    out = table.new_full((table.shape[0], width), fill, dtype=torch.float32)
    out[:, pad : pad + used] = table.detach()[:, :used].float() * factor
    return out


def _strides(x: Tensor) -> tuple[int, ...]:
    """Strides of batch, head and row; 0 for an axis of one, so that none hinders alignment."""
    return tuple(x.stride(i) if x.shape[i] > 1 else 0 for i in range(3))


def _tables(problem: Problem, pad: int) -> tuple[Tensor | None, Tensor | None]:
    length = problem.k.shape[2]
    used = min(length, problem.window)
    bias = padded_table(problem.bias, used, length, pad, -math.inf, 1.0 / problem.scale)
    weight = padded_table(problem.weight, used, length, pad, 0.0, 1.0)
    return bias, weight


def _table_stride(*tables: Tensor | None) -> int:
    return max((t.stride(0) for t in tables if t is not None), default=0)


def forward_launch(problem: Problem) -> tuple[Launch, Tensor, Tensor]:
    """The forward kernel's launch, and the tensors it will fill: out [B, H, Lq, D] and lse."""
    q, k, v = problem.q, problem.k, problem.v
    batch, heads, q_length, head_dim = q.shape
    tiles = forward_tiles(problem.block_d, q.dtype, problem.weight is not None)
    # [B, L, H, D] in memory: merging the heads afterwards is then a view
    out = q.new_empty(batch, q_length, heads, head_dim).transpose(1, 2)
    lse = q.new_empty(batch * heads, cdiv(q_length, _LSE_ROWS) * _LSE_ROWS, dtype=torch.float32)
    # distances of a visited tile go from -(rows + columns) to k_length + rows
    pad = tiles.rows + tiles.columns
    bias, weight = _tables(problem, pad)
    arguments = (
        q, k, v, bias, weight, problem.visible, out, lse,
        *_strides(q), *_strides(k), *_strides(v), *_strides(out),
        lse.stride(0), _table_stride(bias, weight), heads, q_length, k.shape[2], problem.window,
        problem.scale * math.log2(math.e),
    )  # fmt: skip
    options = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": problem.block_d,
        "SLICE_D": tiles.slice_d or problem.block_d,
        "BLOCK_M": tiles.rows,
        "BLOCK_N": tiles.columns,
        "TABLE_PAD": pad,
        "HAS_BIAS": bias is not None,
        "HAS_WEIGHT": weight is not None,
        "PRECISION": _FP32_PRODUCTS,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        "enable_fp_fusion": True,
    }
    grid = (cdiv(q_length, tiles.rows), batch * heads)
    return Launch(attention_forward_kernel, grid, arguments, options), out, lse


def _delta_launch(out: Tensor, grad_out: Tensor, block_d: int, delta: Tensor) -> Launch:
    batch, heads, q_length, head_dim = out.shape
    rows = 2048 // block_d
    strides = (*_strides(out), *_strides(grad_out), delta.stride(0))
    arguments = (out, grad_out, delta, *strides, heads, q_length)
    options = {"HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_M": rows, "num_warps": 4}
    options["enable_fp_fusion"] = True
    grid = (delta.shape[1] // rows, batch * heads)
    return Launch(attention_delta_kernel, grid, arguments, options)


@dataclass(frozen=True)
class BackwardResult:
    """What the backward kernels fill; the shares still have to be summed (`gradients`)."""

    dq_shares: Tensor  # [splits, B, H, Lq, D] fp32
    dk: Tensor
    dv: Tensor
    dbias_shares: Tensor | None  # [splits, B, H, squares, width] fp32
    dweight_shares: Tensor | None
    pad: int


def backward_launches(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    *,
    table_grads: tuple[bool, bool],
    processors: int,
) -> tuple[list[Launch], BackwardResult]:
    """The backward's launches in order, and the tensors that they fill."""
    q, k, v = problem.q, problem.k, problem.v
    batch, heads, q_length, head_dim = q.shape
    k_length = k.shape[2]
    tiles = backward_tiles(problem.block_d, q.dtype, problem.weight is not None)
    squares = tiles.columns // tiles.rows
    # a step adds to distances from -(columns + rows) on
    pad = tiles.columns + 2 * tiles.rows
    bias, weight = _tables(problem, pad)
    dq_bytes = batch * heads * q_length * head_dim * 4
    key_blocks = cdiv(k_length, tiles.columns)
    splits = split_count(batch * heads, key_blocks, dq_bytes, processors)

    def share(table: Tensor | None, wanted: bool) -> Tensor | None:
        if table is None or not wanted:
            return None
        return table.new_zeros(splits, batch, heads, squares, table.shape[1])

    result = BackwardResult(
        dq_shares=q.new_zeros(splits, *q.shape, dtype=torch.float32),
        dk=k.new_empty(batch, k_length, heads, head_dim).transpose(1, 2),
        dv=v.new_empty(batch, k_length, heads, head_dim).transpose(1, 2),
        dbias_shares=share(bias, table_grads[0]),
        dweight_shares=share(weight, table_grads[1]),
        pad=pad,
    )
    delta = torch.empty_like(lse)
    arguments = (
        q, k, v, grad_out, bias, weight, problem.visible, lse, delta,
        result.dq_shares, result.dk, result.dv, result.dbias_shares, result.dweight_shares,
        *_strides(q), *_strides(k), *_strides(v), *_strides(grad_out), *_strides(result.dk),
        lse.stride(0), _table_stride(bias, weight), heads, q_length, k_length, problem.window,
        problem.scale, problem.scale * math.log2(math.e),
    )  # fmt: skip
    options = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": problem.block_d,
        "SLICE_D": tiles.slice_d or problem.block_d,
        "KEYS": tiles.columns,
        "QUERIES": tiles.rows,
        "TABLE_PAD": pad,
        "HAS_BIAS": bias is not None,
        "HAS_WEIGHT": weight is not None,
        "BIAS_GRAD": result.dbias_shares is not None,
        "WEIGHT_GRAD": result.dweight_shares is not None,
        "PRECISION": _FP32_PRODUCTS,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        "enable_fp_fusion": True,
    }
    main = Launch(attention_backward_kernel, (splits, batch * heads), arguments, options)
    return [_delta_launch(out, grad_out, problem.block_d, delta), main], result
