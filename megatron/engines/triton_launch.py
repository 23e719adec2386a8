"""What the Triton attention engine launches: arguments, grids, workspaces.

`forward_launches` and `backward_launches` only build `Launch` records. The engine runs them, and
tools/compile_triton.py compiles the very same records for GPUs that are not there, so what is
checked is what runs. Tile sizes come from triton_tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.engines.triton_backward import (
    attention_band_kernel,
    attention_delta_kernel,
    attention_dkdv_kernel,
    attention_dq_kernel,
)
from megatron.engines.triton_forward import Constants, attention_forward_kernel
from megatron.engines.triton_problem import LOG2E, Problem, Terms, rows_of, table_layout, terms_of
from megatron.engines.triton_runtime import Launch, cdiv
from megatron.engines.triton_tiles import Tiles, steep_warps, tiles_of

# fp32 products as three TF32 products on the tensor cores: close to fp32. No effect on bf16, fp16.
_FP32_PRODUCTS = "tf32x3"


@dataclass(frozen=True)
class Wanted:
    """Which gradients a backward has to compute."""

    q: bool = True
    keys: bool = True  # of k, v or the key bias
    bias: bool = False
    weight: bool = False
    key_bias: bool = False


@dataclass(frozen=True)
class BackwardResult:
    """What the backward kernels fill."""

    delta: Tensor  # [B * H, padded Lq]
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dkey_bias: Tensor | None  # [B, H, Lk] fp32
    dbias_bands: Tensor | None  # [B, H, bands, 2, squares, columns] fp32: see `table_gradient`
    dweight_bands: Tensor | None


def _tiles(kernel: str, problem: Problem) -> Tiles:
    weighted = problem.weight is not None
    return tiles_of(kernel, problem.block_d, problem.q.dtype, weighted, problem.arch)


def _sizes(problem: Problem, reverse: bool) -> tuple[Any, ...]:
    """The numbers that all kernels take last (triton_forward.NUMBERS)."""
    q_length, k_length = problem.q.shape[2], problem.k.shape[2]
    return (
        problem.q.shape[1], problem.group, q_length, k_length, problem.window,
        table_layout(k_length, reverse)[0], problem.scale * LOG2E,
    )  # fmt: skip


def _options(problem: Problem, tiles: Tiles, masked: bool = True) -> dict[str, Any]:
    """`masked`: the kernel masks scores itself, unless a bias table holds the edges."""
    causal = masked and problem.bias is None
    constants = Constants(
        HEAD_DIM=problem.head_dim,
        BLOCK_D=problem.block_d,
        SLICE_D=tiles.slice_d or problem.block_d,
        BLOCK_M=tiles.queries,
        BLOCK_N=tiles.keys,
        CAUSAL=causal,
        WINDOW=causal and problem.window < problem.k.shape[2],
        PRECISION=_FP32_PRODUCTS,
        STAGES=tiles.stages,
    )
    return {
        "C": constants,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        "enable_fp_fusion": True,
    }


def forward_launches(problem: Problem) -> tuple[list[Launch], Tensor, Tensor]:
    """The forward's launches, and the tensors they fill: out [B, H, Lq, D] and lse."""
    q = problem.q
    batch, heads, q_length, head_dim = q.shape
    tiles = _tiles("forward", problem)
    # [B, L, H, D] in memory: merging the heads afterwards is then a view
    out = q.new_empty(batch, q_length, heads, head_dim).transpose(1, 2)
    lse = q.new_empty(batch * heads, problem.padded_rows, dtype=torch.float32)
    launches, terms = terms_of(problem, reverse=True)
    rows = (rows_of(x) for x in (q, problem.k, problem.v, out))
    arguments = (*rows, terms, problem.sink, lse, *_sizes(problem, reverse=True))
    grid = (cdiv(q_length, tiles.queries), batch * heads)
    options = _options(problem, tiles)
    launches.append(Launch(attention_forward_kernel, grid, arguments, options))
    return launches, out, lse


def _delta_launch(
    problem: Problem, out: Tensor, grad: Tensor, delta: Tensor, lse: Tensor
) -> Launch:
    batch, heads, q_length, head_dim = out.shape
    rows = 2048 // problem.block_d
    strides = (delta.stride(0), heads, q_length)
    arguments = (rows_of(out), rows_of(grad), delta, lse, *strides)
    options = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": problem.block_d,
        "BLOCK_M": rows,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    grid = (delta.shape[1] // rows, batch * heads)
    return Launch(attention_delta_kernel, grid, arguments, options)


def _query_ends(problem: Problem, keys: int) -> Tensor | None:
    """For each block of keys, one past the last query that sees one of them: [B, blocks]."""
    if problem.first_key is None:
        return None
    k_length = problem.k.shape[2]
    last = torch.arange(keys - 1, cdiv(k_length, keys) * keys, keys, device=problem.q.device)
    last = last.to(torch.int32).expand(problem.first_key.shape[0], -1).contiguous()
    # the rows that fill up the end begin beyond every key
    return torch.searchsorted(problem.first_key, last, right=True, out_int32=True)


def _product_factor(problem: Problem) -> float:
    """What turns sums of dS * (weight in base 2) * k into dQ."""
    return problem.scale if problem.weight is None else 1.0 / LOG2E


def _dkdv_launch(
    problem: Problem, grad: Tensor, lse: Tensor, result: BackwardResult, terms: Terms
) -> Launch:
    k = problem.k
    tiles = _tiles("dkdv", problem)
    assert result.dk is not None and result.dv is not None
    rows = (rows_of(x) for x in (problem.q, k, problem.v, grad, result.dk, result.dv))
    arguments = (
        *rows, terms, _query_ends(problem, tiles.keys), lse, result.delta, result.dkey_bias,
        *_sizes(problem, reverse=False), _product_factor(problem),
    )  # fmt: skip
    grid = (cdiv(k.shape[2], tiles.keys), k.shape[0] * k.shape[1])
    return Launch(attention_dkdv_kernel, grid, arguments, _options(problem, tiles))


def _dq_launch(
    problem: Problem, grad: Tensor, lse: Tensor, result: BackwardResult, terms: Terms
) -> Launch:
    q = problem.q
    tiles = _tiles("dq", problem)
    assert result.dq is not None
    rows = (rows_of(x) for x in (q, problem.k, problem.v, grad, result.dq))
    sizes = _sizes(problem, reverse=True)
    arguments = (*rows, terms, lse, result.delta, *sizes, _product_factor(problem))
    grid = (cdiv(q.shape[2], tiles.queries), q.shape[0] * q.shape[1])
    return Launch(attention_dq_kernel, grid, arguments, _options(problem, tiles))


def band_shift(offset: int, columns: int) -> int:
    """Distances by which all bands are moved, so that their blocks of keys begin at multiples."""
    return -offset % columns


def band_count(reach: int, offset: int, tiles: Tiles) -> int:
    """Bands of `keys` distances whose tiles hold a distance below `reach`."""
    last = reach + tiles.keys - 2 + band_shift(offset, tiles.keys)
    return last // tiles.keys + tiles.queries // tiles.keys


def _band_launches(
    problem: Problem, grad: Tensor, lse: Tensor, result: BackwardResult, terms: Terms
) -> list[Launch]:
    """One launch with a weight table; without, one for gentle bands and one for steep ones."""
    q, k = problem.q, problem.k
    tiles = _tiles("band", problem)
    rows = (rows_of(x) for x in (q, k, problem.v, grad))
    arguments = (
        *rows, terms, lse, result.delta, result.dbias_bands, result.dweight_bands,
        *_sizes(problem, reverse=True), 0,
    )  # fmt: skip
    options = _options(problem, tiles, masked=False)
    bands = band_count(min(problem.window, k.shape[2]), problem.offset, tiles)
    grid = (bands, q.shape[0] * q.shape[1])
    if problem.weight is not None:
        return [Launch(attention_band_kernel, grid, arguments, options | {"IN_LOOP": True})]
    warps = steep_warps(problem.block_d, q.dtype, tiles.warps)
    kinds = ({"IN_LOOP": False}, {"IN_LOOP": True, "num_warps": warps})
    return [Launch(attention_band_kernel, grid, arguments, options | kind) for kind in kinds]


def _results(problem: Problem, lse: Tensor, wanted: Wanted) -> BackwardResult:
    batch, heads, q_length, head_dim = problem.q.shape
    _, key_heads, k_length, _ = problem.k.shape
    tiles = _tiles("band", problem)
    bands = band_count(min(problem.window, k_length), problem.offset, tiles)
    # [B, L, H, D] in memory, as for the output

    def like(x: Tensor, length: int, count: int) -> Tensor:
        return x.new_empty(batch, length, count, head_dim).transpose(1, 2)

    def shares(table: Tensor | None, asked: bool) -> Tensor | None:
        if table is None or not asked:
            return None
        shape = (batch, heads, bands, 2, tiles.queries // tiles.keys, tiles.keys)
        return lse.new_empty(shape)

    has_key_grad = wanted.key_bias and problem.key_bias is not None
    return BackwardResult(
        delta=torch.empty_like(lse),
        dq=like(problem.q, q_length, heads) if wanted.q else None,
        dk=like(problem.k, k_length, key_heads) if wanted.keys else None,
        dv=like(problem.v, k_length, key_heads) if wanted.keys else None,
        dkey_bias=lse.new_empty(batch, heads, k_length) if has_key_grad else None,
        dbias_bands=shares(problem.bias, wanted.bias),
        dweight_bands=shares(problem.weight, wanted.weight),
    )


def backward_launches(
    problem: Problem, out: Tensor, lse: Tensor, grad: Tensor, wanted: Wanted
) -> tuple[list[Launch], BackwardResult]:
    """The backward's launches in order, and the tensors that they fill."""
    result = _results(problem, lse, wanted)
    launches = [_delta_launch(problem, out, grad, result.delta, lse)]
    if wanted.keys:
        made, terms = terms_of(problem, reverse=False)
        launches += [*made, _dkdv_launch(problem, grad, lse, result, terms)]
    has_bands = result.dbias_bands is not None or result.dweight_bands is not None
    if wanted.q or has_bands:
        made, terms = terms_of(problem, reverse=True)
        launches += made
        if wanted.q:
            launches.append(_dq_launch(problem, grad, lse, result, terms))
        if has_bands:
            launches += _band_launches(problem, grad, lse, result, terms)
    return launches, result


def table_gradient(problem: Problem, bands: Tensor, factor: float = 1.0) -> Tensor:
    """The gradient of a table, [H, Lk], from its bands' diagonals; 0 where nobody looks.

    Square R of band j (the first band is 1 - squares) has in its first row the distances from
    (j + R) * columns - shift on, in its second row those before. Summed in a fixed order.
    """
    shares = bands.sum(0)  # over sequences
    heads, count, _, squares, columns = shares.shape
    total = shares.new_zeros(heads, count + squares, columns)
    for square in range(squares):
        total[:, square + 1 : square + 1 + count] += shares[:, :, 0, square]
        total[:, square : square + count] += shares[:, :, 1, square]
    start = squares * columns + band_shift(problem.offset, columns)
    used = min(problem.window, problem.k.shape[2])
    grad = shares.new_zeros(heads, problem.k.shape[2])
    grad[:, :used] = total.flatten(1)[:, start : start + used] * factor
    return grad
