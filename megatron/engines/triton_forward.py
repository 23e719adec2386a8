"""Forward kernel of the Triton attention engine, and the tile functions that its kernels share.

Legend: M query rows of a tile, N key columns, D head dimension (padded to a power of 2).

Units. A score is (q.k) * scale * weight[d] + bias[d] + key_bias[n]. All kernels work on
x = score * log2(e), so that a probability is one exp2: x = (q.k) * c + bias2[d] with
c = scale * log2(e), or (q.k) * weight2[d] + bias2[d]; the host has multiplied the tables
(see triton_tables). Adding the bias after the product keeps the product's registers free of
it, and lets the bias travel to shared memory by cp.async like k and v do.

Masks. Scores that must not count are NOTHING or less, rows start with a maximum of LOWEST. The
first is so far below the second that exp2 of the difference is 0 whatever a row has seen: no
special case for a row, or a tile of it, that sees no key. The bias table holds NOTHING at
distances below 0 (the future, and keys beyond the end) and outside the window, so that edges are
masked by the values they load. Without a bias the mask is computed.

Slices. A product over the head dimension needs both its tiles whole in registers. Where they do
not fit (fp32, wide heads) SLICE_D is a part of BLOCK_D: the products add up slice by slice, each
loaded when its turn comes.

A key bias is taken relative to the query's own key, `own[m]`: cumulative sums of 1e4 then keep
their small differences. The row's constant drops out of the softmax, and stays out of lse.
"""

# Triton reads the signatures below; their run-time arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, name-defined"

from __future__ import annotations

from megatron.engines.triton_compat import constant, jit, tl
from megatron.engines.triton_tables import LOWEST, NOTHING, row_offsets

__all__ = [
    "LOG2E",
    "attention_forward_kernel",
    "load_rows",
    "store_rows",
    "tile_mask",
    "tile_scores",
]

LOG2E = constant(1.4426950408889634)


@jit()
def tile_mask(rows, length, dims, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows inside the sequence and, where the head dimension is padded, real dimensions."""
    mask = rows[:, None] < length
    if HEAD_DIM != BLOCK_D:
        mask = mask & (dims[None, :] < HEAD_DIM)
    return mask


@jit()
def load_rows(
    base,
    start,
    length,
    row_stride,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The [ROWS, BLOCK_D] tile that begins at row `start`; zeros outside."""
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    # 64-bit only for the scalar part, so that long sequences do not overflow and registers are few
    tile = base + tl.cast(start, tl.int64) * row_stride
    pointers = tile + rows[:, None] * row_stride + dims[None, :]
    mask = tile_mask(start + rows, length, dims, HEAD_DIM, BLOCK_D)
    return tl.load(pointers, mask=mask, other=0.0)


@jit()
def sliced_product(
    a_base,
    a_start,
    a_length,
    a_stride,
    b_base,
    b_start,
    b_length,
    b_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLICE_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A B^T, where A and B are rows of two tensors, SLICE_D of their elements at a time."""
    tl.static_assert(HEAD_DIM % SLICE_D == 0)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for d in range(0, HEAD_DIM, SLICE_D):
        a = load_rows(a_base + d, a_start, a_length, a_stride, ROWS, SLICE_D, SLICE_D)
        b = load_rows(b_base + d, b_start, b_length, b_stride, COLUMNS, SLICE_D, SLICE_D)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    return total


@jit()
def store_rows(
    base,
    start,
    length,
    row_stride,
    values,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write a tile to the rows from `start` on, in the dtype of the pointer."""
    rows = tl.arange(0, values.shape[0])
    dims = tl.arange(0, BLOCK_D)
    tile = base + tl.cast(start, tl.int64) * row_stride
    pointers = tile + rows[:, None] * row_stride + dims[None, :]
    mask = tile_mask(start + rows, length, dims, HEAD_DIM, BLOCK_D)
    tl.store(pointers, values.to(base.dtype.element_ty), mask=mask)


@jit()
def tile_scores(
    product,
    bias_row,
    start,
    entries,
    weight,
    query,
    key,
    own,
    key_bias,
    first_key,
    window,
    exponent_scale,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_KEY_BIAS: tl.constexpr,
    HAS_FIRST_KEY: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """x of one tile (see the top of the file) from its products; all arguments broadcast."""
    # scaled first: Triton would otherwise hand the bias to the product as its first summand
    x = product * (weight if HAS_WEIGHT else exponent_scale)
    if HAS_BIAS:
        x += tl.load(bias_row + start + entries, cache_modifier=".ca")
    if HAS_KEY_BIAS:
        x += (key_bias - own) * LOG2E
    if not HAS_BIAS:
        x = tl.where(query >= key, x, NOTHING)
        if HAS_WINDOW:
            x = tl.where(query - key < window, x, NOTHING)
    if HAS_FIRST_KEY:
        x = tl.where(key >= first_key, x, NOTHING)
    return x


@jit(
    do_not_specialize=[
        "heads", "group", "q_length", "k_length", "window", "table_start", "exponent_scale",
        "key_bias_stride_b", "key_bias_stride_h", "sink_stride_b", "sink_stride_h", "sink_stride_l",
    ]
)  # fmt: skip
def attention_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,  # [heads, 4, copy_stride]: reversed shifted copies of bias * log2(e); or None
    weight_ptr,  # the same of weight * scale * log2(e); or None
    key_bias_ptr,  # [batch or 1, heads or 1, k_length] fp32; or None
    own_ptr,  # the same shape: finite references for the rows
    first_key_ptr,  # [batch, q_length] int32; or None
    sink_ptr,  # base 2, relative to own; or None
    visible_ptr,  # [heads] int32: distances worth visiting
    out_ptr,
    lse_ptr,  # [batch * heads, lse_stride], base 2, -NOTHING for rows that see nothing
    q_stride_b, q_stride_h, q_stride_l,
    k_stride_b, k_stride_h, k_stride_l,
    v_stride_b, v_stride_h, v_stride_l,
    out_stride_b, out_stride_h, out_stride_l,
    lse_stride,
    copy_stride,
    key_bias_stride_b, key_bias_stride_h,
    sink_stride_b, sink_stride_h, sink_stride_l,
    heads,
    group,
    q_length,
    k_length,
    window,
    table_start,
    exponent_scale,  # c = scale * log2(e)
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLICE_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_KEY_BIAS: tl.constexpr,
    HAS_FIRST_KEY: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head: walk the visible key blocks with a running softmax."""
    # the last query blocks see the most keys: start them first
    m_start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    batch_head = tl.program_id(1)
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    key_head = head // group
    q_base = q_ptr + batch * q_stride_b + head * q_stride_h
    k_base = k_ptr + batch * k_stride_b + key_head * k_stride_h
    v_base = v_ptr + batch * v_stride_b + key_head * v_stride_h
    reach = tl.minimum(window, tl.load(visible_ptr + head))

    position = k_length - q_length + m_start  # of the first query of the block
    first = tl.maximum(position - reach + 1, 0)
    end = tl.minimum(position + BLOCK_M, k_length)
    offsets_m = tl.arange(0, BLOCK_M)
    offsets_n = tl.arange(0, BLOCK_N)
    rows = m_start + offsets_m

    bias_row = bias_ptr
    weight_row = weight_ptr
    entries = row_offsets(table_start - position - offsets_m, copy_stride)
    if HAS_BIAS:
        bias_row += head * 4 * copy_stride
    if HAS_WEIGHT:
        weight_row += head * 4 * copy_stride
    own = tl.zeros([BLOCK_M], tl.float32)
    key_bias_row = key_bias_ptr
    if HAS_KEY_BIAS:
        key_bias_row += batch * key_bias_stride_b + head * key_bias_stride_h
        own_row = own_ptr + batch * key_bias_stride_b + head * key_bias_stride_h
        own = tl.load(own_row + position + offsets_m, mask=rows < q_length, other=0.0)
    first_key = tl.zeros([BLOCK_M], tl.int32)
    if HAS_FIRST_KEY:
        first_key_row = first_key_ptr + batch * q_length
        first_key = tl.load(first_key_row + rows, mask=rows < q_length, other=0)
        first = tl.maximum(first, tl.load(first_key_row + m_start))  # they do not decrease
    first = first // BLOCK_N * BLOCK_N

    if SLICE_D == BLOCK_D:
        q = load_rows(q_base, m_start, q_length, q_stride_l, BLOCK_M, HEAD_DIM, BLOCK_D)
    largest = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINK:
        sink_row = sink_ptr + batch * sink_stride_b + head * sink_stride_h
        sink = tl.load(sink_row + rows * sink_stride_l, mask=rows < q_length, other=NOTHING)
        largest = tl.maximum(largest, sink)
        total = tl.math.exp2(sink - largest)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n_start in tl.range(first, end, BLOCK_N, num_stages=STAGES):
        n_start = tl.multiple_of(n_start, BLOCK_N)
        keys = n_start + offsets_n
        if SLICE_D == BLOCK_D:
            k = load_rows(k_base, n_start, k_length, k_stride_l, BLOCK_N, HEAD_DIM, BLOCK_D)
            product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        else:
            product = sliced_product(
                q_base, m_start, q_length, q_stride_l, k_base, n_start, k_length, k_stride_l,
                BLOCK_M, BLOCK_N, HEAD_DIM, SLICE_D, PRECISION,
            )  # fmt: skip
        weight = 0.0
        key_bias = 0.0
        if HAS_WEIGHT:
            weight = tl.load(
                weight_row + n_start + (entries[:, None] + offsets_n[None, :]), cache_modifier=".ca"
            )
        if HAS_KEY_BIAS:
            key_bias = tl.load(key_bias_row + keys, mask=keys < k_length, other=0.0)[None, :]
        x = tile_scores(
            product, bias_row, n_start, entries[:, None] + offsets_n[None, :], weight,
            (position + offsets_m)[:, None], keys[None, :], own[:, None], key_bias,
            first_key[:, None], window, exponent_scale,
            HAS_BIAS, HAS_WEIGHT, HAS_KEY_BIAS, HAS_FIRST_KEY, HAS_WINDOW,
        )  # fmt: skip
        new_largest = tl.maximum(largest, tl.max(x, 1))
        p = tl.math.exp2(x - new_largest[:, None])
        shrink = tl.math.exp2(largest - new_largest)
        total = total * shrink + tl.sum(p, 1)
        v = load_rows(v_base, n_start, k_length, v_stride_l, BLOCK_N, HEAD_DIM, BLOCK_D)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        largest = new_largest

    seen = total > 0.0
    safe = tl.where(seen, total, 1.0)
    out_base = out_ptr + batch * out_stride_b + head * out_stride_h
    store_rows(out_base, m_start, q_length, out_stride_l, acc / safe[:, None], HEAD_DIM, BLOCK_D)
    # rows that see nothing, or lie past the end: their probabilities are 0 in the backward
    lse = tl.where(seen & (rows < q_length), largest + tl.math.log2(safe), -NOTHING)
    tl.store(lse_ptr + batch_head.to(tl.int64) * lse_stride + rows, lse)
