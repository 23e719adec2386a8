"""What the Triton attention engine launches: arguments, grids, workspaces.

`forward_launches` and `backward_launches` only build `Launch` records. The engine runs them, and
tools/compile_triton.py compiles the same records ahead of time for other GPUs, so what is checked
is what runs. Tile sizes come from triton_tiles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.engines.call import empty_blhd
from megatron.engines.dropout import kept_scale, threshold
from megatron.engines.triton_backward import (
    attention_delta_kernel,
    attention_dkdv_kernel,
    attention_dq_kernel,
)
from megatron.engines.triton_bands import attention_band_kernel
from megatron.engines.triton_features import (
    distance_gradient,
    feature_extent,
    strip_grid,
    strip_pitch,
    with_features,
    with_strips,
)
from megatron.engines.triton_forward import Constants, attention_forward_kernel
from megatron.engines.triton_problem import (
    LOG2E,
    Problem,
    Terms,
    rows_of,
    table_layout,
    terms_of,
)
from megatron.engines.triton_runtime import Launch, cdiv, constant
from megatron.engines.triton_tiles import Tiles, tiles_of

# fp32 products as three TF32 products on the tensor cores: close to fp32. No effect on bf16, fp16.
_FP32_PRODUCTS = "tf32x3"
# With features ptxas gives some kernels 128 or 168 registers for each thread, and spills the rest.
_MOST_REGISTERS = 255
# operands whose gradients attention_dkdv_kernel computes
_FROM_DKDV_KERNEL = {"k", "v", "key_bias"}
_FROM_DQ_KERNEL = {"q", "row_scale", "query_features", "distance_features"}


# What the backward's kernels fill: gradients by operand, those of the tables as bands,
# [B, H, bands, 2, squares, columns] fp32 (see `table_gradient`).
Filled = dict[str, Tensor]


def _tiles(kernel: str, problem: Problem) -> Tiles:
    operands = (problem.block_d, problem.q.dtype, problem.weight is not None)
    features = problem.query_features is not None
    return tiles_of(kernel, *operands, problem.arch, problem.shared_memory, features)


def _sizes(problem: Problem, reverse: bool) -> tuple[Any, ...]:
    """The numbers that all kernels take last (triton_forward.NUMBERS)."""
    start, _ = table_layout(problem.k_len, reverse)
    lengths = (problem.q_len, problem.k_len, problem.reach)
    heads = (problem.q.shape[1], problem.heads_per_key_head)
    return *heads, *lengths, start, problem.scale * LOG2E


def _options(problem: Problem, tiles: Tiles, terms: Terms, masked: bool = True) -> dict[str, Any]:
    """`masked`: the kernel masks scores itself, unless a bias table holds the edges."""
    causal = masked and problem.bias is None
    constants = Constants(
        HEAD_DIM=problem.head_dim,
        BLOCK_D=problem.block_d,
        SLICE_D=tiles.slice_d or problem.block_d,
        BLOCK_M=tiles.queries,
        BLOCK_N=tiles.keys,
        CAUSAL=causal,
        WINDOW=causal and problem.window is not None,
        PRECISION=_FP32_PRODUCTS,
        STAGES=tiles.stages,
        FEATURES=0 if terms.features is None else terms.features.query.shape[-1],
        PITCH=strip_pitch(terms),
        DROP_BELOW=threshold(problem.dropout),
        KEPT_SCALE=kept_scale(problem.dropout),
    )
    options: dict[str, Any] = {
        # Triton 3.7 unpacks a NamedTuple: each field must be declared constexpr by itself
        "C": Constants(*(constant(value) for value in constants)),
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        "enable_fp_fusion": True,
    }
    if terms.features is not None:
        options["maxnreg"] = _MOST_REGISTERS
    return options


def forward_launches(problem: Problem) -> tuple[list[Launch], Tensor, Tensor]:
    """The forward's launches, and the tensors they fill: out [B, H, Lq, D] and lse."""
    q = problem.q
    batch, heads = q.shape[:2]
    tiles = _tiles("forward", problem)
    out = empty_blhd(q.shape, q.dtype, q.device)
    lse = q.new_empty(batch * heads, problem.padded_rows, dtype=torch.float32)
    launches, terms = terms_of(problem, reverse=True)
    terms = with_features(terms, problem, ones=False)
    grid, terms = _placed("forward", terms, problem, tiles)
    rows = (rows_of(x) for x in (q, problem.k, problem.v, out))
    arguments = (*rows, terms, problem.sink, lse, *_sizes(problem, reverse=True))
    options = _options(problem, tiles, terms)
    launches.append(Launch(attention_forward_kernel, grid, arguments, options))
    return launches, out, lse


def _placed(
    kernel: str, terms: Terms, problem: Problem, tiles: Tiles
) -> tuple[tuple[int, ...], Terms]:
    """The grid of a launch over blocks of queries, of keys or bands; the terms with its strips."""
    heads = (problem.k if kernel == "dkdv" else problem.q).shape[1]
    if kernel == "band":
        blocks = _band_count(problem, tiles)
    elif kernel == "dkdv":
        blocks = cdiv(problem.k_len, tiles.keys)
    else:
        blocks = cdiv(problem.q_len, tiles.queries)
    if terms.features is None or (kernel == "band" and problem.weight is None):
        return (blocks, heads, problem.q.shape[0]), terms
    grid = strip_grid(problem, heads, blocks)
    return grid, with_strips(terms, problem, tiles, grid[0] * grid[1], kernel)


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
    grid = (delta.shape[1] // rows, heads, batch)
    return Launch(attention_delta_kernel, grid, arguments, options)


def _query_ends(problem: Problem, keys: int) -> Tensor | None:
    """For each block of keys, one past the last query that sees one of them: [B, blocks]."""
    if problem.first_key is None:
        return None
    end = cdiv(problem.k_len, keys) * keys
    last = torch.arange(keys - 1, end, keys, device=problem.q.device)
    last = last.to(torch.int32).expand(problem.first_key.shape[0], -1).contiguous()
    # the rows that fill up the end begin beyond every key
    return torch.searchsorted(problem.first_key, last, right=True, out_int32=True)


def _band_shift(offset: int, columns: int) -> int:
    """Distances by which all bands are moved, so that their blocks of keys begin at multiples."""
    return -offset % columns


def _band_count(problem: Problem, tiles: Tiles) -> int:
    """Bands of `keys` distances whose tiles hold a distance below the reach."""
    last = problem.reach + tiles.keys - 2 + _band_shift(problem.offset, tiles.keys)
    return last // tiles.keys + tiles.queries // tiles.keys


def _band_launches(
    problem: Problem, grad: Tensor, rows: tuple[Tensor, Tensor], terms: Terms, filled: Filled
) -> list[Launch]:
    """One launch with a weight table; without, one for gentle bands and one for steep ones.

    A row scale leaves no band gentle: the bias is not the same along a diagonal.
    """
    tiles = _tiles("band", problem)
    kinds = {True: tiles}
    if problem.weight is None:
        kinds = {False: tiles, True: _tiles("steep band", problem)}
    if problem.weight is None and problem.row_scale is not None:
        del kinds[False]
    grid, terms = _placed("band", terms, problem, tiles)
    lines = (rows_of(x) for x in (problem.q, problem.k, problem.v, grad))
    numbers = (*_sizes(problem, reverse=True), _band_count(problem, tiles), 0)
    arguments = (*lines, terms, *rows, filled.get("bias"), filled.get("weight"), *numbers)
    launches = []
    for in_loop, chosen in kinds.items():
        options = _options(problem, chosen, terms, masked=False) | {"IN_LOOP": in_loop}
        launches.append(Launch(attention_band_kernel, grid, arguments, options))
    return launches


def _to_fill(problem: Problem, lse: Tensor, wanted: set[str]) -> Filled:
    """Memory for the gradients that are wanted; k and v share a kernel with the key bias."""
    filled: Filled = {}
    kernels = {"q": _FROM_DQ_KERNEL, "k": _FROM_DKDV_KERNEL, "v": _FROM_DKDV_KERNEL}
    for name, together in kernels.items():
        if wanted & together or (name == "q" and _bias_from_features(problem, wanted)):
            x: Tensor = getattr(problem, name)
            filled[name] = empty_blhd(x.shape, x.dtype, x.device)
    batch, heads = problem.q.shape[:2]
    if "key_bias" in wanted:
        filled["key_bias"] = lse.new_empty(batch, heads, problem.k_len)
    if "row_scale" in wanted:
        filled["row_scale"] = torch.empty_like(lse)
    tiles = _tiles("band", problem)
    bands = (_band_count(problem, tiles), 2, tiles.queries // tiles.keys, tiles.keys)
    tables = (name for name in ("bias", "weight") if name in wanted)
    return filled | {name: lse.new_empty(batch, heads, *bands) for name in tables}


def _bias_from_features(problem: Problem, wanted: set[str]) -> bool:
    """True if the bias's gradient at near distances is that of one more feature."""
    by_bands = problem.query_features is None or problem.weight is not None
    return "bias" in wanted and not by_bands


def backward_launches(
    problem: Problem, out: Tensor, lse: Tensor, grad: Tensor, wanted: set[str]
) -> tuple[list[Launch], Filled, Tensor]:
    """The backward's launches in order, and what they fill; delta, [B * H, padded Lq], last."""
    delta, filled = torch.empty_like(lse), _to_fill(problem, lse, wanted)
    launches = [_delta_launch(problem, out, grad, delta, lse)]
    operands = (problem.q, problem.k, problem.v, grad)
    # what turns sums of dS * (weight in base 2) * k into dQ
    factor = problem.scale if problem.weight is None else 1.0 / LOG2E
    if wanted & _FROM_DKDV_KERNEL:
        made, terms = terms_of(problem, reverse=False)
        tiles = _tiles("dkdv", problem)
        terms = with_features(terms, problem, ones=False)
        grid, terms = _placed("dkdv", terms, problem, tiles)
        rows = (rows_of(x) for x in (*operands, filled["k"], filled["v"]))
        own = (_query_ends(problem, tiles.keys), lse, delta, filled.get("key_bias"))
        arguments = (*rows, terms, *own, *_sizes(problem, reverse=False), factor)
        options = _options(problem, tiles, terms)
        launches += [*made, Launch(attention_dkdv_kernel, grid, arguments, options)]
    if wanted & {*_FROM_DQ_KERNEL, "bias", "weight"}:
        made, terms = terms_of(problem, reverse=True)
        terms = with_features(terms, problem, _bias_from_features(problem, wanted))
        launches += made
        if "q" in filled:
            launches.append(_dq_launch(problem, grad, (lse, delta), terms, filled, wanted))
        if wanted & {"bias", "weight"}:
            launches += _band_launches(problem, grad, (lse, delta), terms, filled)
    return launches, filled, delta


def _dq_launch(
    problem: Problem, grad: Tensor, rows: tuple[Tensor, Tensor], terms: Terms, filled: Filled,
    wanted: set[str],
) -> Launch:  # fmt: skip
    """dQ with the gradients of row scale and features: adds the features' to `filled`."""
    tiles = _tiles("dq", problem)
    grid, terms = _placed("dq", terms, problem, tiles)
    by_feature = {"query_features", "distance_features"} & wanted
    if by_feature or _bias_from_features(problem, wanted):
        features, lse = terms.features, rows[0]
        width = features.query.shape[-1]
        filled["query_features"] = lse.new_empty(*lse.shape, width)
        shares = (problem.q.shape[1], grid[0], features.line, width)
        filled["distance_features"] = lse.new_zeros(shares)
    lines = (rows_of(x) for x in (problem.q, problem.k, problem.v, grad, filled["q"]))
    names = ("row_scale", "query_features", "distance_features")
    made = (filled.get(name) for name in names)
    factor = problem.scale if problem.weight is None else 1.0 / LOG2E
    arguments = (*lines, terms, *rows, *made, *_sizes(problem, reverse=True), factor)
    return Launch(attention_dq_kernel, grid, arguments, _options(problem, tiles, terms))


def table_gradient(problem: Problem, bands: Tensor, factor: float) -> Tensor:
    """The gradient of a table, [H, Lk], from its bands' diagonals; 0 at unseen distances.

    Square R of band j (the first band is 1 - squares) has in its first row the distances from
    (j + R) * columns - shift on, in its second row those before. Summed in a fixed order.
    """
    shares = bands.sum(0)  # over sequences
    heads, count, _, squares, columns = shares.shape
    total = shares.new_zeros(heads, count + squares, columns)
    for square in range(squares):
        total[:, square + 1 : square + 1 + count] += shares[:, :, 0, square]
        total[:, square : square + count] += shares[:, :, 1, square]
    start = squares * columns + _band_shift(problem.offset, columns)
    grad = shares.new_zeros(heads, problem.k_len)
    used = slice(start, start + problem.reach)
    grad[:, : problem.reach] = total.flatten(1)[:, used] * factor
    return grad


def feature_gradients(problem: Problem, filled: Filled) -> None:
    """Turn what dQ's kernel filled into the gradients of both features and, near, of the bias."""
    assert problem.query_features is not None
    extent, count = feature_extent(problem), problem.query_features.shape[-1]
    by_distance = distance_gradient(filled["distance_features"], extent)
    if _bias_from_features(problem, set(filled)):
        filled["bias"][:, :extent] += by_distance[:, count]
    filled["distance_features"] = by_distance[:, :count]
    lines = filled["query_features"].unflatten(0, problem.q.shape[:2])
    filled["query_features"] = lines[:, :, : problem.q_len, :count]
