"""Forward kernel of the Triton attention engine, and the tile functions that its kernels share.

Legend: M query rows of a tile, N key columns, D head dimension (padded to a power of 2).

Units. A score is (q.k) * scale * weight[d] + bias[d] + key_bias[n], plus the features' term
(see triton_features), all of it times row_scale[m]. All kernels work on x = score * log2(e), so
that a probability is one exp2: x = (q.k) * c + bias2[d] with c = scale * log2(e), or
(q.k) * weight2[d] + bias2[d]; the host has multiplied the tables (see triton_problem). Adding the
bias after the product keeps the product's registers free of it, and lets cp.async load the bias
into shared memory like k and v.

Masks. Scores that must not count are NOTHING or less, rows start with a maximum of LOWEST. The
first is so far below the second that exp2 of the difference is 0 whatever a row has seen: no
special case for a row, or a tile of it, that sees no key. The bias table holds NOTHING at
distances below 0 (the future, and keys beyond the end) and outside the window, so that edges are
masked by the values they load. Without a bias the mask is computed (CAUSAL).

Slices. A product over the head dimension needs both its tiles whole in registers. Where they do
not fit (fp32, wide heads) SLICE_D is a part of BLOCK_D: the products add up slice by slice, each
loaded when its turn comes.

A key bias is taken relative to the query's own key, `own[m]`: cumulative sums of 1e4 then keep
their small differences. The row's constant drops out of the softmax, and stays out of lse.
"""

# Triton reads the signatures below; their run-time arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, name-defined"

from __future__ import annotations

from typing import Any, NamedTuple

from megatron.engines.dropout import FACTORS_32, STEP_32
from megatron.engines.triton_features import (
    fill_query_strip,
    head_features,
    query_strip_tile,
)
from megatron.engines.triton_problem import LOWEST, NOTHING, row_offsets
from megatron.engines.triton_runtime import constant, jit, tl

LOG2E = constant(1.4426950408889634)
# below this before a row's factor multiplies it, a score does not count
_MASKED = constant(-1e20)

# of dropout.kept
_STEP, _FIRST_FACTOR, _SECOND_FACTOR = (constant(x) for x in (STEP_32, *FACTORS_32))

# The numbers that every kernel takes: their values must not make Triton compile again.
NUMBERS = ["heads", "group", "q_length", "k_length", "window", "table_start", "exponent_scale"]


class Sizes(NamedTuple):
    """The numbers of `NUMBERS`, inside a kernel."""

    heads: Any
    group: Any  # query heads that share a key head
    q_length: Any
    k_length: Any
    window: Any
    table_start: Any  # entry of a table's first copy that is distance 0
    exponent_scale: Any  # c = scale * log2(e)


class Constants(NamedTuple):
    """What a kernel is compiled for."""

    HEAD_DIM: int
    BLOCK_D: int
    SLICE_D: int
    BLOCK_M: int
    BLOCK_N: int
    CAUSAL: bool  # mask the future, and
    WINDOW: bool  # what is outside the window: a bias table masks both by itself
    PRECISION: str
    STAGES: int
    FEATURES: int  # query features, padded; 0 without
    PITCH: int  # of the strips: a constant, or each row's pointer takes registers of its own
    DROP_BELOW: int  # a key whose hash is below this is dropped, and
    KEPT_SCALE: float  # the others' weights are multiplied by this; see dropout


class Line(NamedTuple):
    """The rows of one head of one sequence."""

    ptr: Any
    row: Any
    length: Any


class HeadTerms(NamedTuple):
    """The terms of one head of one sequence (see triton_problem.Terms)."""

    bias: Any
    weight: Any
    key_bias: Any
    own: Any
    first_key: Any
    row_scale: Any
    hash_low: Any
    hash_high: Any
    features: Any  # triton_features.HeadFeatures
    reach: Any  # how many of the nearest keys a query may see


class QueryBlock(NamedTuple):
    """A block of queries, and the keys that they see."""

    position: Any  # of the first query
    first: Any
    end: Any
    rows: Any
    entries: Any  # where the tables' runs begin
    own: Any
    first_key: Any
    row_scale: Any
    hashes: Any


@jit()
def head_of_program():
    """(sequence, head) of this program, 64 bits wide: the grid is (blocks, heads, sequences)."""
    return tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)


@jit()
def line_of(x, batch, head, length):
    return Line(x.ptr + batch * x.batch + head * x.head, x.row, length)


@jit()
def tile_mask(rows, length, dims, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows inside the sequence and, where the head dimension is padded, real dimensions."""
    mask = rows[:, None] < length
    if HEAD_DIM != BLOCK_D:
        mask = mask & (dims[None, :] < HEAD_DIM)
    return mask


@jit()
def tile_pointers(line, start, rows, dims):
    # 64-bit only for the scalar part, so that long sequences do not overflow and registers are few
    tile = line.ptr + tl.cast(start, tl.int64) * line.row
    return tile + rows[:, None] * line.row + dims[None, :]


@jit()
def load_tile(line, start, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The [ROWS, BLOCK_D] tile that begins at row `start`; zeros outside."""
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    mask = tile_mask(start + rows, line.length, dims, HEAD_DIM, BLOCK_D)
    return tl.load(tile_pointers(line, start, rows, dims), mask=mask, other=0.0)


@jit()
def store_tile(line, start, values, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write a tile to the rows from `start` on, in the dtype of the pointer."""
    rows = tl.arange(0, values.shape[0])
    dims = tl.arange(0, BLOCK_D)
    mask = tile_mask(start + rows, line.length, dims, HEAD_DIM, BLOCK_D)
    values = values.to(line.ptr.dtype.element_ty)
    tl.store(tile_pointers(line, start, rows, dims), values, mask=mask)


@jit()
def tile_product(a, a_start, b, b_start, C: tl.constexpr):
    """A B^T of BLOCK_M rows of one line and BLOCK_N of another, SLICE_D elements at a time."""
    if C.SLICE_D == C.BLOCK_D:
        left = load_tile(a, a_start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D)
        right = load_tile(b, b_start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D)
        total = tl.dot(left, tl.trans(right), input_precision=C.PRECISION)
    else:
        tl.static_assert(C.HEAD_DIM % C.SLICE_D == 0)
        total = tl.zeros([C.BLOCK_M, C.BLOCK_N], tl.float32)
        for d in range(0, C.HEAD_DIM, C.SLICE_D):
            left_line = Line(a.ptr + d, a.row, a.length)
            right_line = Line(b.ptr + d, b.row, b.length)
            left = load_tile(left_line, a_start, C.BLOCK_M, C.SLICE_D, C.SLICE_D)
            right = load_tile(right_line, b_start, C.BLOCK_N, C.SLICE_D, C.SLICE_D)
            total = tl.dot(left, tl.trans(right), total, input_precision=C.PRECISION)
    return total


@jit()
def moved(ptr, offset):
    """A pointer moved by an offset; None stays None."""
    return ptr if ptr is None else ptr + offset


@jit()
def head_terms(terms, batch, head, sizes, C: tl.constexpr):
    line = batch * sizes.heads + head
    return HeadTerms(
        moved(terms.bias, head * 4 * terms.copy_stride),
        moved(terms.weight, head * 4 * terms.copy_stride),
        moved(terms.key_bias, line * terms.key_stride),
        moved(terms.own, line * terms.row_stride),
        moved(terms.first_key, batch * terms.row_stride),
        moved(terms.row_scale, line * terms.row_stride),
        moved(terms.row_hashes, line * 2 * terms.row_stride),
        moved(terms.row_hashes, (line * 2 + 1) * terms.row_stride),
        head_features(terms.features, line, head, terms.row_stride, C),
        tl.minimum(sizes.window, tl.load(terms.visible + head)),
    )


@jit()
def load_along(ptr, places, AXIS: tl.constexpr):
    """Numbers at these places, of one row (AXIS 0) or column (AXIS 1); 0 where there are none."""
    return 0 if ptr is None else tl.expand_dims(tl.load(ptr + places), AXIS)


@jit()
def tile_scores(
    product, terms, start, entries, query, key, row_terms, added, sizes, C: tl.constexpr
):
    """x of one tile (see the top of the file) from its products, and their factors.

    `row_terms` are own, key bias, first key and row scale; like `query` and `key` they broadcast to
    the tile. `added` is what the features add, or None.
    """
    own, key_bias, first_key, row_scale = row_terms
    factor = sizes.exponent_scale
    if terms.weight is not None:
        factor = tl.load(terms.weight + start + entries, cache_modifier=".ca")
    # scaled first: Triton would otherwise hand the bias to the product as its first summand
    x = product * factor
    if terms.bias is not None:
        x += tl.load(terms.bias + start + entries, cache_modifier=".ca")
    if terms.key_bias is not None:
        x += (key_bias - own) * LOG2E
    if added is not None:
        x += added
    if terms.row_scale is not None:
        x = tl.where(x < _MASKED, NOTHING, x * row_scale)
    if C.CAUSAL:
        x = tl.where(query >= key, x, NOTHING)
        if C.WINDOW:
            x = tl.where(query - key < sizes.window, x, NOTHING)
    if terms.first_key is not None:
        x = tl.where(key >= first_key, x, NOTHING)
    return x, factor


@jit()
def load_hashes(terms, rows, AXIS: tl.constexpr):
    """The two hashes of each query, along one axis as in `load_along`; 0 without dropout."""
    return load_along(terms.hash_low, rows, AXIS), load_along(terms.hash_high, rows, AXIS)


@jit()
def kept(hashes, key, values, C: tl.constexpr):
    """The values of the keys that dropout keeps, 0 for the others: `kept` of dropout.py."""
    low, high = hashes
    x = key.to(tl.uint32) * _STEP + low.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * _FIRST_FACTOR + high.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 13)) * _SECOND_FACTOR
    return tl.where(x.to(tl.int32, bitcast=True) >= C.DROP_BELOW, values, 0.0)


@jit()
def query_block(m_start, terms, copy_stride, sizes, C: tl.constexpr):
    """The block of queries from `m_start` on, and the blocks of keys to walk."""
    position = sizes.k_length - sizes.q_length + m_start
    first = tl.maximum(position - terms.reach + 1, 0)
    end = tl.minimum(position + C.BLOCK_M, sizes.k_length)
    offsets = tl.arange(0, C.BLOCK_M)
    rows = m_start + offsets
    entries = row_offsets(sizes.table_start - position - offsets, copy_stride)
    own = load_along(terms.own, rows, 1)
    first_key = load_along(terms.first_key, rows, 1)
    if terms.first_key is not None:
        first = tl.maximum(first, tl.load(terms.first_key + m_start))  # they do not decrease
    first = first // C.BLOCK_N * C.BLOCK_N
    row_scale = load_along(terms.row_scale, rows, 1)
    hashes = load_hashes(terms, rows, 1)
    return QueryBlock(position, first, end, rows, entries, own, first_key, row_scale, hashes)


@jit()
def load_block(k, v, terms, m_start, batch, head, sizes, C: tl.constexpr):
    """What a block of queries of one head is computed from; with features its strip is filled.

    Lines of k and v, the head's terms, the block, and the first key that the features reach.
    """
    k_line = line_of(k, batch, head // sizes.group, sizes.k_length)
    v_line = line_of(v, batch, head // sizes.group, sizes.k_length)
    own_terms = head_terms(terms, batch, head, sizes, C)
    block = query_block(m_start, own_terms, terms.copy_stride, sizes, C)
    near = block.end
    if terms.features is not None:
        features = own_terms.features
        near = fill_query_strip(features, m_start, block.position, block.first, block.end, C)
    return k_line, v_line, own_terms, block, near


@jit()
def query_scores(product, terms, block, n_start, added, sizes, C: tl.constexpr):
    """`tile_scores` of a block of queries and the keys from `n_start` on."""
    offsets_n = tl.arange(0, C.BLOCK_N)
    key_bias = load_along(terms.key_bias, n_start + offsets_n, 0)
    query = (block.position + tl.arange(0, C.BLOCK_M))[:, None]
    key = (n_start + offsets_n)[None, :]
    entries = block.entries[:, None] + offsets_n[None, :]
    row_terms = (block.own, key_bias, block.first_key, block.row_scale)
    return tile_scores(product, terms, n_start, entries, query, key, row_terms, added, sizes, C)


@jit()
def block_of_program(C: tl.constexpr):
    """(sequence, head, first query) of this program, the last blocks of queries first."""
    m_start = (tl.num_programs(0) - 1 - tl.program_id(0)) * C.BLOCK_M
    batch, head = head_of_program()
    return batch, head, m_start


@jit()
def block_of_item(item, length, ROWS: tl.constexpr):
    """(sequence, first query) of an item, the last blocks of queries first."""
    blocks = tl.cdiv(length, ROWS)
    return (item // blocks).to(tl.int64), (blocks - 1 - item % blocks) * ROWS


@jit()
def forward_walk(
    state, q_line, k_line, v_line, q_tile, m_start, terms, block, first, end, strip, sizes,
    C: tl.constexpr,
):  # fmt: skip
    """The running softmax (maximum, sum, output) with the keys from `first` to `end` as well."""
    largest, total, acc = state
    for n_start in tl.range(first, end, C.BLOCK_N, num_stages=C.STAGES):
        n_start = tl.multiple_of(n_start, C.BLOCK_N)
        if C.SLICE_D == C.BLOCK_D:
            k_tile = load_tile(k_line, n_start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D)
            product = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
        else:
            product = tile_product(q_line, m_start, k_line, n_start, C)
        added = None if strip is None else tl.load(strip + n_start).to(tl.float32)
        x, _ = query_scores(product, terms, block, n_start, added, sizes, C)
        new_largest = tl.maximum(largest, tl.max(x, 1))
        p = tl.math.exp2(x - new_largest[:, None])
        shrink = tl.math.exp2(largest - new_largest)
        total = total * shrink + tl.sum(p, 1)
        if terms.hash_low is not None:
            p = kept(block.hashes, (n_start + tl.arange(0, C.BLOCK_N))[None, :], p, C)
        v_tile = load_tile(v_line, n_start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision=C.PRECISION)
        largest = new_largest
    return largest, total, acc


@jit()
def forward_block(
    q, k, v, out, terms, sink_ptr, lse_ptr, m_start, batch, head, sizes, C: tl.constexpr
):  # fmt: skip
    """One block of queries of one head: walk the visible key blocks with a running softmax."""
    q_line = line_of(q, batch, head, sizes.q_length)
    k_line, v_line, row_terms, block, near = load_block(k, v, terms, m_start, batch, head, sizes, C)
    lines = (batch * sizes.heads + head) * terms.row_stride
    q_tile = None
    if C.SLICE_D == C.BLOCK_D:
        q_tile = load_tile(q_line, m_start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D)
    largest = tl.full([C.BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([C.BLOCK_M], tl.float32)
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + lines + block.rows)
        largest = tl.maximum(largest, sink)
        total = tl.math.exp2(sink - largest)
    acc = tl.zeros([C.BLOCK_M, C.BLOCK_D], tl.float32)
    state = forward_walk(
        (largest, total, acc), q_line, k_line, v_line, q_tile, m_start, row_terms, block,
        block.first, near, None, sizes, C,
    )  # fmt: skip
    if terms.features is not None:
        strip = query_strip_tile(row_terms.features, near, C)
        state = forward_walk(
            state, q_line, k_line, v_line, q_tile, m_start, row_terms, block,
            near, block.end, strip, sizes, C,
        )  # fmt: skip
    largest, total, acc = state
    if terms.row_hashes is not None:
        acc *= C.KEPT_SCALE
    seen = total > 0.0
    safe = tl.where(seen, total, 1.0)
    out_line = line_of(out, batch, head, sizes.q_length)
    store_tile(out_line, m_start, acc / safe[:, None], C.HEAD_DIM, C.BLOCK_D)
    # rows that see nothing, or lie past the end: their probabilities are 0 in the backward
    lse = tl.where(seen & (block.rows < sizes.q_length), largest + tl.math.log2(safe), -NOTHING)
    tl.store(lse_ptr + lines + block.rows, lse)


@jit(do_not_specialize=NUMBERS)
def attention_forward_kernel(
    q, k, v, out,  # Rows
    terms,  # with reversed tables
    sink_ptr,  # [batch * heads, row_stride], base 2, relative to own; or None
    lse_ptr,  # the same shape, base 2, -NOTHING for rows that see nothing
    heads, group, q_length, k_length, window, table_start, exponent_scale,
    C: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head; with features, every so many of a head's blocks."""
    sizes = Sizes(heads, group, q_length, k_length, window, table_start, exponent_scale)
    if terms.features is None:
        # the last query blocks see the most keys: start them first
        batch, head, m_start = block_of_program(C)
        forward_block(q, k, v, out, terms, sink_ptr, lse_ptr, m_start, batch, head, sizes, C)
    else:
        _, head = head_of_program()
        items = tl.cdiv(q_length, C.BLOCK_M) * tl.load(terms.features.counts + 1)
        for item in tl.range(tl.program_id(0), items, tl.num_programs(0)):
            batch, m_start = block_of_item(item, q_length, C.BLOCK_M)
            forward_block(q, k, v, out, terms, sink_ptr, lse_ptr, m_start, batch, head, sizes, C)
