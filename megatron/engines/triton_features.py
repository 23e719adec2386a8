"""Query features times distance features in the Triton kernels: strips in global memory.

The term of a score is G[m, d] = sum over r of query_features[m, r] * distance_features[r, d], d the
distance of query m to the key, and 0 from distance E on. A product of a block's query features with
distance features has distances as columns; a tile of scores has keys, and row i of the block needs
its columns moved by i. A program writes the product to memory of its own, its strip, with rows one
element longer than it reads them: that moves row i by i.

    written, column = falling distance     read with rows of `pitch`, column = key
    row 0   a b c d .                      . . . a b c d
    row 1     e f g h .         is         . . e f g h .     as row i begins at i * (pitch + 1) + 1
    row 2       i j k l .                  . i j k l . .     and is read from i * pitch + ROWS on

Row i, column c of the product is distance top - c, for the key ROWS - 1 - i places before column c:
i * (pitch + 1) + 1 + c = i * pitch + ROWS + (key - first key of the strip). With a pitch that is a
multiple of 16 every run of a tile of scores is aligned, and cp.async loads it as it loads k and v.

The strip is fp16 (fp32 for fp32 inputs), in base 2. In dQ the gradients of the scores overwrite the
entries that were read; read by distance again, they are summed to the gradients of both features. A
program takes several blocks, one after the other, so that the memory of the strips depends on E and
the number of programs, not on the length; a barrier stands between writing and reading. A program
stays with one head and has sums of its own for the gradient of the distance features, which the
host adds in order: no atomics, and every run gives the same bits.
"""

# Triton reads the kernels' signatures; their run-time arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, name-defined"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.engines.triton_problem import ALIGNMENT, Problem, Terms, padded, table_layout
from megatron.engines.triton_runtime import cdiv, constant, jit, next_power_of_2, tl
from megatron.engines.triton_tiles import Tiles

LOG2E = constant(1.4426950408889634)
# Programs that a launch should have: twice what an A100 holds at once. A constant: the sums of the
# distance features' gradient depend on it.
PROGRAMS = 432
# Queries of a strip in dK and dV, and those whose strips are written before they are walked.
STRIP_QUERIES = 128
STRIP_ROWS = constant(STRIP_QUERIES)
_CHUNK_STRIPS = 2
CHUNK = constant(_CHUNK_STRIPS * STRIP_QUERIES)
# what fp16 can hold; no score that counts is near it
_LARGEST = constant(6e4)
_FILL_COLUMNS = 128  # distances of a product at a time, at most


class Features(NamedTuple):
    """Both features and the strips, in a kernel. All strides are multiples of 16."""

    query: Any  # [B * H, row_stride, R], R a power of 2; rows past the end are 0
    distance: Any  # [H or 1, 8 or 4, R, line]: shifted copies, reversed, 0 outside of 0 .. E-1
    strips: Any  # [programs, rows, pitch + 16]; None for bands that leave the features' reach out
    counts: Any  # int32: E, sequences, and the entry of a line that is distance 0
    head: int  # from one head's distance features to the next
    line: int
    slot: int


class HeadFeatures(NamedTuple):
    """`Features` of one head of one sequence, with the strip of this program."""

    query: Any
    distance: Any
    strip: Any
    extent: Any  # E
    start: Any
    line: Any


# The host's part


def with_features(terms: Terms, problem: Problem, ones: bool) -> Terms:
    """The terms with the features laid out, as yet without strips.

    `ones`: with one more query feature, 1, that adds nothing to a score. The gradient of its
    distance features is the sum of all gradients of a distance: that of the bias.
    """
    if problem.query_features is None or problem.distance_features is None:
        return terms
    dtype = problem.q.dtype
    query = problem.query_features.to(dtype)
    table = problem.distance_features[..., : feature_extent(problem)].to(dtype)
    count, extent = table.shape[1:]
    width = padded_features(count + ones)
    if ones:
        query = F.pad(query, (0, 1), value=1.0)
    rows = padded(problem.q_len) - problem.q_len
    query = F.pad(query, (0, width - query.shape[-1], 0, rows)).contiguous()
    start, line = table_layout(extent, reverse=True)
    copies = 4 if dtype == torch.float32 else 8
    before, after = start - extent + 1, line - start - 1 + copies
    table = F.pad(table.flip(-1), (before, after, 0, width - count))
    table = torch.stack([table[..., i : i + line] for i in range(copies)], 1).contiguous()
    # not from a list: that would make the host wait for the GPU
    counts = torch.full((3,), extent, dtype=torch.int32, device=problem.q.device)
    counts[1].fill_(problem.q.shape[0])
    counts[2].fill_(start)
    head = copies * width * line if table.shape[0] > 1 else 0
    return terms._replace(features=Features(query, table, None, counts, head, line, 0))


def padded_features(count: int) -> int:
    return max(16, next_power_of_2(count))


def feature_extent(problem: Problem) -> int:
    """E: the distances that the features reach and a query sees."""
    assert problem.distance_features is not None
    return min(problem.distance_features.shape[2], problem.reach)


def strip_grid(problem: Problem, heads: int, blocks: int) -> tuple[int, int, int]:
    """The grid of a launch whose programs take the blocks of one head of all sequences."""
    return min(blocks * problem.q.shape[0], cdiv(PROGRAMS, heads)), heads, 1


def with_strips(terms: Terms, problem: Problem, tiles: Tiles, programs: int, kernel: str) -> Terms:
    """The terms with memory for the strips of a launch of this kernel."""
    assert terms.features is not None
    rows, strips = (STRIP_QUERIES, _CHUNK_STRIPS) if kernel == "dkdv" else (tiles.queries, 1)
    columns = rows + tiles.keys
    if kernel in ("forward", "dq"):
        # a block of queries sees at most so many keys within the features' reach, in whole tiles.
        # A power of 2: each pitch is compiled for, and a cache of keys grows up to E
        columns += next_power_of_2(feature_extent(problem)) + rows + tiles.keys
    row = cdiv(columns, _FILL_COLUMNS) * _FILL_COLUMNS + 2 * ALIGNMENT
    dtype = torch.float32 if problem.q.dtype == torch.float32 else torch.float16
    memory = torch.empty(programs, strips * rows, row, dtype=dtype, device=problem.q.device)
    features = terms.features._replace(strips=memory, slot=memory.stride(0))
    return terms._replace(features=features)


def strip_pitch(terms: Terms) -> int:
    """Elements from one row of a strip to the next as it is read; 0 without strips."""
    if terms.features is None or terms.features.strips is None:
        return 0
    return int(terms.features.strips.shape[-1]) - ALIGNMENT


def distance_gradient(shares: Tensor, extent: int) -> Tensor:
    """[H, R, E] from the programs' sums, [H, programs, line, R]."""
    start, _ = table_layout(extent, reverse=True)
    total = shares.sum(1)
    return total[:, start - extent + 1 : start + 1].flip(1).mT


# The kernels' part


@jit()
def own_strip(strips, offset):
    """This program's strip; None in kernels that have none."""
    return strips if strips is None else strips + offset


@jit()
def head_features(features, line, head, row_stride, C: tl.constexpr):
    """The features of one head; None without."""
    if features is None:
        return None
    else:
        program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        return HeadFeatures(
            features.query + line * row_stride * C.FEATURES,
            features.distance + head * features.head,
            own_strip(features.strips, program.to(tl.int64) * features.slot),
            tl.load(features.counts),
            tl.load(features.counts + 2),
            features.line,
        )


@jit()
def fill_strip(strip, features, m_start, top, count, ROWS: tl.constexpr, C: tl.constexpr):
    """Columns 0 .. count - 1 of a strip, for the queries from `m_start` on.

    Half precision takes rows by their residue modulo 4: rows 4 j + s begin at column 3 - s (what
    is left out lies before their first key), so that four neighbours are stored at once.
    """
    FP32: tl.constexpr = strip.dtype.element_ty == tl.float32
    STEP: tl.constexpr = 1 if FP32 else 4
    COPIES: tl.constexpr = 4 if FP32 else 8
    COLUMNS: tl.constexpr = 32 if FP32 else 128
    j = tl.arange(0, ROWS // STEP)
    c = tl.arange(0, COLUMNS)
    r = tl.arange(0, C.FEATURES)
    for s in tl.static_range(STEP):
        rows = m_start + STEP * j + s
        query = tl.load(features.query + rows[:, None] * C.FEATURES + r[None, :])
        out = strip + (s * C.PITCH + STEP)
        out += j[:, None] * (STEP * (C.PITCH + 1)) + c[None, :]
        first = features.start - top + (STEP - 1 - s)
        copy = features.distance + (first & (COPIES - 1)) * (C.FEATURES * features.line)
        at = copy + first // COPIES * COPIES + r[:, None] * features.line + c[None, :]
        for column in tl.range(0, count, COLUMNS, num_stages=2):
            column = tl.multiple_of(column, COLUMNS)
            g = tl.dot(query, tl.load(at + column), input_precision=C.PRECISION) * LOG2E
            g = g if FP32 else tl.minimum(tl.maximum(g, -_LARGEST), _LARGEST)
            tl.store(out + column, g.to(strip.dtype.element_ty))


@jit()
def fill_query_strip(features, m_start, position, first, end, C: tl.constexpr):
    """Write the strip of a block of queries that walks the keys from `first` to `end`.

    Returns the first key of the strip: keys before it are farther than all features.
    """
    near = tl.maximum(position - features.extent + 1, 0) // C.BLOCK_N * C.BLOCK_N
    near = tl.multiple_of(tl.maximum(near, first), C.BLOCK_N)
    tl.debug_barrier()  # the block before is read
    top = position + C.BLOCK_M - 1 - near
    count = tl.cdiv(end - near, C.BLOCK_N) * C.BLOCK_N + C.BLOCK_M
    fill_strip(features.strip, features, m_start, top, count, C.BLOCK_M, C)
    tl.debug_barrier()
    return near


@jit()
def query_strip_tile(features, near, C: tl.constexpr):
    """Pointers to the tile of a query strip whose first key is 0."""
    rows = tl.arange(0, C.BLOCK_M)[:, None] * C.PITCH
    return features.strip + C.BLOCK_M - near + rows + tl.arange(0, C.BLOCK_N)[None, :]


@jit()
def in_dtype(pointers, dtype: tl.constexpr):
    """Pointers to numbers of another dtype of the same size."""
    if pointers.dtype.element_ty == dtype:
        return pointers
    else:
        return pointers.to(tl.pointer_type(dtype), bitcast=True)


@jit()
def strip_gradients(
    strip,  # with gradients of scores
    features, dquery_ptr, share_ptr, m_start, top, keys, C: tl.constexpr,
):  # fmt: skip
    """The block's gradient of the query features, and its share of the distance features'.

    `keys` have been walked; entries of the strip outside of them are not gradients.
    """
    COLUMNS: tl.constexpr = 32  # 64 spill twice as much at head dim 128
    i = tl.arange(0, C.BLOCK_M)
    c = tl.arange(0, COLUMNS)
    r = tl.arange(0, C.FEATURES)
    places = (m_start + i)[:, None] * C.FEATURES + r[None, :]
    query = tl.load(features.query + places)
    at = strip + 1 + i[:, None] * (C.PITCH + 1) + c[None, :]
    first = features.start - top
    COPIES: tl.constexpr = 4 if strip.dtype.element_ty == tl.float32 else 8
    copy = features.distance + (first & (COPIES - 1)) * (C.FEATURES * features.line)
    distance = copy + first // COPIES * COPIES + r[:, None] * features.line + c[None, :]
    share = share_ptr + (first + c)[:, None] * C.FEATURES + r[None, :]
    dquery = tl.zeros([C.BLOCK_M, C.FEATURES], tl.float32)
    tl.debug_barrier()  # all gradients are in the strip
    for column in tl.range(0, keys + C.BLOCK_M, COLUMNS, num_stages=2):
        column = tl.multiple_of(column, COLUMNS)
        key = column - (C.BLOCK_M - 1) + i[:, None] + c[None, :]
        ds = tl.load(at + column)
        ds = tl.where((key >= 0) & (key < keys), ds, 0.0)
        table = tl.load(distance + column)
        dquery = tl.dot(ds, tl.trans(table), dquery, input_precision=C.PRECISION)
        added = tl.dot(tl.trans(ds), query, input_precision=C.PRECISION)
        target = share + column * C.FEATURES
        tl.store(target, tl.load(target) + added)
    tl.store(dquery_ptr + places, dquery)


@jit()
def fill_key_strips(features, m_first, m_end, n_start, offset, C: tl.constexpr):
    """Write strips for a block of keys: one for each STRIP_ROWS queries of `m_first` to `m_end`."""
    tl.debug_barrier()  # the strips before are read
    for m_start in tl.range(m_first, m_end, STRIP_ROWS):
        strip = features.strip + (m_start - m_first) * (C.PITCH + 16)
        top = offset + m_start + STRIP_ROWS - 1 - n_start
        fill_strip(strip, features, m_start, top, STRIP_ROWS + C.BLOCK_N, STRIP_ROWS, C)
    tl.debug_barrier()


@jit()
def key_strip_scores(features, m_first, m_start, C: tl.constexpr):
    """The features' term of a tile [key, query], from strips that begin with query `m_first`."""
    number = (m_start - m_first) // STRIP_ROWS
    row = m_start - m_first - number * STRIP_ROWS
    at = features.strip + STRIP_ROWS + number * (STRIP_ROWS * (C.PITCH + 16))
    at += row * C.PITCH
    m = tl.arange(0, C.BLOCK_M)
    n = tl.arange(0, C.BLOCK_N)
    tile = tl.load(at + m[None, :] * C.PITCH + n[:, None])
    if tile.dtype == tl.float32:
        return tile
    else:
        # a product by the identity, which is exact: only a product's operand comes by cp.async,
        # and turned without a barrier
        return tl.dot(tile, (m[:, None] == m[None, :]).to(tile.dtype))
