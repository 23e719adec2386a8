"""Forward kernel of the Triton attention engine, and the tile functions both kernels share.

Legend: M query rows of a tile, N key columns of a tile, D head dimension (padded to a power of 2).

Units. A score is q.k * scale * weight[d] + bias[d]. The kernels work on t = score / scale, that is
t = q.k * weight[d] + bias[d] / scale, and turn it into probabilities with one multiply-add per
element: exp(score - max) = exp2(t * c - max_t * c) with c = scale * log2(e). Hence the matrix
product can start from bias[d] / scale instead of zero: the add is free, and q stays unrounded.

Masks. The bias table comes padded with -inf on both sides: distances below 0 (the future, and
keys beyond the end) and distances outside the window. A tile on the edge is masked by the values
that it loads, a tile inside pays nothing for masking. Without a bias the mask is computed.

Slices. A product over the head dimension (the scores; in the backward also dP) needs both its tiles
whole in registers. Where they do not fit (fp32, BLOCK_D 256), SLICE_D is a part of BLOCK_D: the
products add up slice by slice, each loaded when its turn comes. Everything else stays as it is.
"""

# Triton reads the signatures below; their run-time arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, name-defined"

from __future__ import annotations

from megatron.engines.triton_compat import jit, tl

__all__ = [
    "attention_forward_kernel",
    "first_term",
    "load_rows",
    "masked_scores",
    "sliced_product",
    "tile_mask",
]


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
    total,
    HEAD_DIM: tl.constexpr,
    SLICE_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """total + A B^T, where A and B are rows of two tensors, SLICE_D of their elements at a time."""
    tl.static_assert(HEAD_DIM % SLICE_D == 0)
    for d in range(0, HEAD_DIM, SLICE_D):
        a = load_rows(a_base + d, a_start, a_length, a_stride, total.shape[0], SLICE_D, SLICE_D)
        b = load_rows(b_base + d, b_start, b_length, b_stride, total.shape[1], SLICE_D, SLICE_D)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    return total


@jit()
def first_term(query, key, bias_row, HAS_BIAS: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    """What the products of one tile are added to: the bias, unless a weight comes in between."""
    if HAS_BIAS and not HAS_WEIGHT:
        return tl.load(bias_row + (query - key))
    else:
        return tl.zeros((query - key).shape, tl.float32)


@jit()
def masked_scores(
    product,
    query,
    key,
    bias_row,
    weight_row,
    window,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    """t of one tile (see the top of the file) from its `first_term` plus products.

    `query` - `key` is the distance, in the tile's shape when broadcast.
    """
    t = product
    if HAS_WEIGHT:
        t = product * tl.load(weight_row + (query - key))
        if HAS_BIAS:
            t += tl.load(bias_row + (query - key))
    if not HAS_BIAS:
        distance = query - key
        t = tl.where((distance >= 0) & (distance < window), t, float("-inf"))
    return t


@jit(do_not_specialize=["heads", "q_length", "k_length", "window", "exponent_scale"])
def attention_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,  # [heads, table_stride], padded, divided by the scale; or None
    weight_ptr,  # [heads, table_stride], padded; or None
    visible_ptr,  # [heads] int32: distances worth visiting
    out_ptr,
    lse_ptr,  # [batch * heads, lse_stride], base 2, +inf past the end
    q_stride_b,
    q_stride_h,
    q_stride_l,
    k_stride_b,
    k_stride_h,
    k_stride_l,
    v_stride_b,
    v_stride_h,
    v_stride_l,
    out_stride_b,
    out_stride_h,
    out_stride_l,
    lse_stride,
    table_stride,
    heads,
    q_length,
    k_length,
    window,
    exponent_scale,  # c = scale * log2(e)
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLICE_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TABLE_PAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of queries of one head: walk the visible key blocks with a running softmax."""
    # the last query blocks see the most keys: start them first
    m_start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    batch_head = tl.program_id(1)
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    q_base = q_ptr + batch * q_stride_b + head * q_stride_h
    k_base = k_ptr + batch * k_stride_b + head * k_stride_h
    v_base = v_ptr + batch * v_stride_b + head * v_stride_h
    bias_row = bias_ptr
    weight_row = weight_ptr
    if HAS_BIAS:
        bias_row = bias_ptr + head * table_stride + TABLE_PAD
    if HAS_WEIGHT:
        weight_row = weight_ptr + head * table_stride + TABLE_PAD
    reach = tl.minimum(window, tl.load(visible_ptr + head))

    position = k_length - q_length + m_start  # of the first query of the block
    first = tl.maximum(position - reach + 1, 0) // BLOCK_N * BLOCK_N
    end = tl.minimum(position + BLOCK_M, k_length)
    offsets_m = tl.arange(0, BLOCK_M)
    offsets_n = tl.arange(0, BLOCK_N)

    if SLICE_D == BLOCK_D:
        q = load_rows(q_base, m_start, q_length, q_stride_l, BLOCK_M, HEAD_DIM, BLOCK_D)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n_start in tl.range(first, end, BLOCK_N):
        query = (position - n_start + offsets_m)[:, None]
        key = offsets_n[None, :]
        if SLICE_D == BLOCK_D:
            k = load_rows(k_base, n_start, k_length, k_stride_l, BLOCK_N, HEAD_DIM, BLOCK_D)
            start = first_term(query, key, bias_row, HAS_BIAS, HAS_WEIGHT)
            product = tl.dot(q, tl.trans(k), start, input_precision=PRECISION)
        else:
            product = sliced_product(
                q_base, m_start, q_length, q_stride_l, k_base, n_start, k_length, k_stride_l,
                first_term(query, key, bias_row, HAS_BIAS, HAS_WEIGHT),
                HEAD_DIM, SLICE_D, PRECISION,
            )  # fmt: skip
        t = masked_scores(product, query, key, bias_row, weight_row, window, HAS_BIAS, HAS_WEIGHT)
        new_largest = tl.maximum(largest, tl.max(t, 1))
        # a row that has not seen a visible key yet: any finite reference does, the sum stays 0
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest) * exponent_scale
        p = tl.math.exp2(t * exponent_scale - reference[:, None])
        shrink = tl.math.exp2(largest * exponent_scale - reference)
        total = total * shrink + tl.sum(p, 1)
        v = load_rows(v_base, n_start, k_length, v_stride_l, BLOCK_N, HEAD_DIM, BLOCK_D)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        largest = new_largest

    acc = acc / total[:, None]
    rows = m_start + offsets_m
    dims = tl.arange(0, BLOCK_D)
    out_tile = out_ptr + batch * out_stride_b + head * out_stride_h
    out_tile += tl.cast(m_start, tl.int64) * out_stride_l
    out_pointers = out_tile + offsets_m[:, None] * out_stride_l + dims[None, :]
    mask = tile_mask(rows, q_length, dims, HEAD_DIM, BLOCK_D)
    tl.store(out_pointers, acc.to(out_ptr.dtype.element_ty), mask=mask)
    # rows past the end get +inf: their probabilities are then exactly 0 in the backward
    lse = tl.where(rows < q_length, largest * exponent_scale + tl.math.log2(total), float("inf"))
    tl.store(lse_ptr + batch_head.to(tl.int64) * lse_stride + rows, lse)
