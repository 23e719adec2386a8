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
    attention_delta_kernel,
    attention_dkdv_kernel,
    attention_dq_kernel,
)
from megatron.engines.triton_band import attention_band_kernel
from megatron.engines.triton_compat import Launch, cdiv
from megatron.engines.triton_forward import attention_forward_kernel
from megatron.engines.triton_problem import LOG2E, Problem, strides
from megatron.engines.triton_tables import NO_SCORE, TableCopies, layout, table_copies
from megatron.engines.triton_tiles import ROW_MULTIPLE, Tiles, steep_warps, tiles_of

__all__ = ["BackwardResult", "Wanted", "backward_launches", "forward_launches", "table_gradient"]

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


def _copies(
    problem: Problem, reverse: bool
) -> tuple[list[Launch], TableCopies | None, TableCopies | None]:
    """The tables in base 2, one way round, and the launches that make them."""
    length = problem.k.shape[2]
    used = min(length, problem.window)
    made: list[tuple[Launch, TableCopies] | None] = []
    for table, fill, factor in (
        (problem.bias, NO_SCORE, LOG2E),
        (problem.weight, 0.0, problem.scale * LOG2E),
    ):
        made.append(
            None
            if table is None
            else table_copies(table, used, length, reverse=reverse, fill=fill, factor=factor)
        )
    bias, weight = ((None if pair is None else pair[1]) for pair in made)
    return [pair[0] for pair in made if pair is not None], bias, weight


def _tensor(copies: TableCopies | None) -> Tensor | None:
    return None if copies is None else copies.copies


def _shared_operands(
    problem: Problem, bias: TableCopies | None, weight: TableCopies | None
) -> tuple[Any, ...]:
    """The tensors that all kernels take after q, k, v (and the gradient of the output)."""
    return _tensor(bias), _tensor(weight), problem.key_bias, problem.own, problem.first_key


def _sizes(problem: Problem, reverse: bool) -> tuple[Any, ...]:
    """The numbers that all kernels take last."""
    q_length, k_length = problem.q.shape[2], problem.k.shape[2]
    return (
        problem.q.shape[1], problem.group, q_length, k_length, problem.window,
        layout(k_length, reverse)[0], problem.scale * LOG2E,
    )  # fmt: skip


def _slice(problem: Problem, tiles: Tiles) -> dict[str, int]:
    return {"SLICE_D": tiles.slice_d or problem.block_d}


def _options(problem: Problem, tiles: Tiles) -> dict[str, Any]:
    has_bias = problem.bias is not None
    return {
        "HEAD_DIM": problem.head_dim,
        "BLOCK_D": problem.block_d,
        "BLOCK_M": tiles.queries,
        "BLOCK_N": tiles.keys,
        "HAS_BIAS": has_bias,
        "HAS_WEIGHT": problem.weight is not None,
        "HAS_KEY_BIAS": problem.key_bias is not None,
        "HAS_FIRST_KEY": problem.first_key is not None,
        # a bias table holds the window's edge itself
        "HAS_WINDOW": problem.window < problem.k.shape[2] and not has_bias,
        "PRECISION": _FP32_PRODUCTS,
        "STAGES": tiles.stages,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        "enable_fp_fusion": True,
    }


def _key_bias_strides(problem: Problem) -> tuple[int, ...]:
    return (0, 0) if problem.key_bias is None else strides(problem.key_bias, 2)


def padded_rows(q_length: int) -> int:
    return cdiv(q_length, ROW_MULTIPLE) * ROW_MULTIPLE


def forward_launches(problem: Problem) -> tuple[list[Launch], Tensor, Tensor]:
    """The forward's launches, and the tensors they fill: out [B, H, Lq, D] and lse."""
    q, k, v = problem.q, problem.k, problem.v
    batch, heads, q_length, head_dim = q.shape
    tiles = _tiles("forward", problem)
    # [B, L, H, D] in memory: merging the heads afterwards is then a view
    out = q.new_empty(batch, q_length, heads, head_dim).transpose(1, 2)
    rows = padded_rows(q_length)
    lse = q.new_empty(batch * heads, rows, dtype=torch.float32)
    launches, bias, weight = _copies(problem, reverse=True)
    sink = problem.sink
    arguments = (
        q, k, v, *_shared_operands(problem, bias, weight), sink, problem.visible, out, lse,
        *strides(q), *strides(k), *strides(v), *strides(out),
        rows, layout(k.shape[2], True)[1], *_key_bias_strides(problem),
        *((0, 0, 0) if sink is None else strides(sink)),
        *_sizes(problem, reverse=True),
    )  # fmt: skip
    options = _options(problem, tiles) | _slice(problem, tiles) | {"HAS_SINK": sink is not None}
    grid = (cdiv(q_length, tiles.queries), batch * heads)
    launches.append(Launch(attention_forward_kernel, grid, arguments, options))
    return launches, out, lse


def _delta_launch(
    problem: Problem, out: Tensor, grad: Tensor, delta: Tensor, lse: Tensor
) -> Launch:
    batch, heads, q_length, head_dim = out.shape
    rows = 2048 // problem.block_d
    arguments = (
        out, grad, delta, lse, *strides(out), *strides(grad), delta.stride(0), heads, q_length
    )  # fmt: skip
    options = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": problem.block_d,
        "BLOCK_M": rows,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    return Launch(
        attention_delta_kernel, (delta.shape[1] // rows, batch * heads), arguments, options
    )


def _query_ends(problem: Problem, keys: int) -> Tensor | None:
    """For each block of keys, one past the last query that sees one of them: [B, blocks]."""
    if problem.first_key is None:
        return None
    k_length = problem.k.shape[2]
    last = torch.arange(keys - 1, cdiv(k_length, keys) * keys, keys, device=problem.q.device)
    last = last.to(torch.int32).expand(problem.first_key.shape[0], -1).contiguous()
    return torch.searchsorted(problem.first_key, last, right=True, out_int32=True)


def _product_factor(problem: Problem) -> float:
    """What turns sums of dS * (weight in base 2) * k into dQ."""
    return problem.scale if problem.weight is None else 1.0 / LOG2E


def _dkdv_launch(
    problem: Problem, grad: Tensor, lse: Tensor, result: BackwardResult, tables: tuple[Any, Any]
) -> Launch:
    q, k, v = problem.q, problem.k, problem.v
    tiles = _tiles("dkdv", problem)
    assert result.dk is not None
    arguments = (
        q, k, v, grad, *_shared_operands(problem, *tables), _query_ends(problem, tiles.keys),
        problem.visible, lse, result.delta, result.dk, result.dv, result.dkey_bias,
        *strides(q), *strides(k), *strides(v), *strides(grad), *strides(result.dk),
        lse.stride(0), layout(k.shape[2], False)[1], *_key_bias_strides(problem),
        *_sizes(problem, reverse=False), _product_factor(problem),
    )  # fmt: skip
    options = _options(problem, tiles) | {"KEY_BIAS_GRAD": result.dkey_bias is not None}
    grid = (cdiv(k.shape[2], tiles.keys), k.shape[0] * k.shape[1])
    return Launch(attention_dkdv_kernel, grid, arguments, options)


def _dq_launch(
    problem: Problem, grad: Tensor, lse: Tensor, result: BackwardResult, tables: tuple[Any, Any]
) -> Launch:
    q, k, v = problem.q, problem.k, problem.v
    tiles = _tiles("dq", problem)
    assert result.dq is not None
    arguments = (
        q, k, v, grad, *_shared_operands(problem, *tables), problem.visible, lse, result.delta,
        result.dq,
        *strides(q), *strides(k), *strides(v), *strides(grad), *strides(result.dq),
        lse.stride(0), layout(k.shape[2], True)[1], *_key_bias_strides(problem),
        *_sizes(problem, reverse=True), _product_factor(problem),
    )  # fmt: skip
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
    problem: Problem, grad: Tensor, lse: Tensor, result: BackwardResult, tables: tuple[Any, Any]
) -> list[Launch]:
    """One launch with a weight table; without, one for gentle bands and one for steep ones."""
    q, k, v = problem.q, problem.k, problem.v
    tiles = _tiles("band", problem)
    arguments = (
        q, k, v, grad, *_shared_operands(problem, *tables), problem.visible, lse, result.delta,
        result.dbias_bands, result.dweight_bands,
        *strides(q), *strides(k), *strides(v), *strides(grad),
        lse.stride(0), layout(k.shape[2], True)[1], *_key_bias_strides(problem),
        *_sizes(problem, reverse=True), 0,
    )  # fmt: skip
    options = _options(problem, tiles) | _slice(problem, tiles)
    del options["HAS_WINDOW"]
    options |= {
        "BIAS_GRAD": result.dbias_bands is not None,
        "WEIGHT_GRAD": result.dweight_bands is not None,
    }
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
        made, *tables = _copies(problem, reverse=False)
        launches += [*made, _dkdv_launch(problem, grad, lse, result, (tables[0], tables[1]))]
    has_bands = result.dbias_bands is not None or result.dweight_bands is not None
    if wanted.q or has_bands:
        made, *tables = _copies(problem, reverse=True)
        launches += made
        reverse = (tables[0], tables[1])
        if wanted.q:
            launches.append(_dq_launch(problem, grad, lse, result, reverse))
        if has_bands:
            launches += _band_launches(problem, grad, lse, result, reverse)
    return launches, result


def table_gradient(problem: Problem, bands: Tensor, table: Tensor, factor: float = 1.0) -> Tensor:
    """The gradient of a table from its bands' diagonals, in a fixed order; 0 where nobody looks.

    Square R of band j (the first band is 1 - squares) has in its first row the distances from
    (j + R) * columns - shift on, in its second row those before.
    """
    shares = bands.sum(0)  # over sequences
    heads, count, _, squares, columns = shares.shape
    total = shares.new_zeros(heads, count + squares, columns)
    for square in range(squares):
        total[:, square + 1 : square + 1 + count] += shares[:, :, 0, square]
        total[:, square : square + count] += shares[:, :, 1, square]
    start = squares * columns + band_shift(problem.offset, columns)
    used = min(problem.window, problem.k.shape[2])
    grad = torch.zeros_like(table)
    grad[:, :used] = total.flatten(1)[:, start : start + used] * factor
    return grad
