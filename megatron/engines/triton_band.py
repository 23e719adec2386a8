"""Gradient of the tables over distance: one program per band of distances, no atomics.

A table entry collects a diagonal of dS over all queries. All tiles whose first query and first
key are `base` apart have the same distances in the same places, so a program owns one `base` of
one head: it walks those tiles, adds dS up element by element in registers, and sums the diagonals
once, at the end. In the walk a table gradient then costs one multiply-add per score.

    key ->                    r - c = distance - base
    q  0 1 2 3 ...            a program's tiles lie on a line from the upper left to the lower
    |  . 0 1 2 3              right, here those marked 0, or 1, ...; tiles left of the diagonal
    v  . . 0 1 2              and beyond the reach of the head are not visited

The bias is constant along a diagonal, so it leaves the walk:
dTable[d] = exp2(b[d] - ref) * sum of exp2(x - b[d] - lse + ref) * (dP - delta). With ref at most
MAX_RANGE below and above the band's entries neither factor overflows, and what underflows is below
1e-18 of a probability. A band in which the table falls by more (ALiBi's steepest heads) is left
to a second launch, which reads the table inside the walk (IN_LOOP), as does every call with a
weight table. Each band belongs to one of the two launches; the other one does nothing for it.
"""

# Triton reads the signatures below; their run-time arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, name-defined"

from __future__ import annotations

from megatron.engines.triton_compat import constant, jit, tl
from megatron.engines.triton_forward import LOG2E, load_rows, sliced_product
from megatron.engines.triton_tables import LOWEST, NOTHING, row_offsets

__all__ = ["MAX_RANGE", "attention_band_kernel"]

# in log2; half of it above and below the reference stays clear of fp32's 2^127
MAX_RANGE = constant(120.0)


@jit()
def store_diagonals(target, tile, mine, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums over the diagonals of each square of a tile [r, c], as 2 rows of ROWS numbers.

    In square R, entry t of the first row has r - c = R * COLUMNS + t, of the second COLUMNS less.
    Rolling row r by r turns diagonals to columns, as the second row's entries are those that wrap.
    """
    r = tl.arange(0, ROWS)[:, None] & (COLUMNS - 1)
    t = tl.arange(0, COLUMNS)[None, :]
    rolled = tl.gather(tile, (r - t) & (COLUMNS - 1), 1)
    near = tl.reshape(tl.where(t <= r, rolled, 0.0), (ROWS // COLUMNS, COLUMNS, COLUMNS))
    far = tl.reshape(tl.where(t <= r, 0.0, rolled), (ROWS // COLUMNS, COLUMNS, COLUMNS))
    place = tl.arange(0, ROWS // COLUMNS)[:, None] * COLUMNS + t
    mask = place < mine * ROWS
    tl.store(target + place, tl.sum(near, 1), mask=mask)
    tl.store(target + ROWS + place, tl.sum(far, 1), mask=mask)


@jit(
    do_not_specialize=[
        "heads", "group", "q_length", "k_length", "window", "table_start", "exponent_scale",
        "key_bias_stride_b", "key_bias_stride_h", "zero",
    ]
)  # fmt: skip
def attention_band_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    bias_ptr,  # reversed copies, as in the forward; or None
    weight_ptr,
    key_bias_ptr,
    own_ptr,
    first_key_ptr,
    visible_ptr,
    lse_ptr,
    delta_ptr,
    dbias_ptr,  # [batch * heads, bands, 2, BLOCK_M] fp32; or None
    dweight_ptr,
    q_stride_b, q_stride_h, q_stride_l,
    k_stride_b, k_stride_h, k_stride_l,
    v_stride_b, v_stride_h, v_stride_l,
    grad_stride_b, grad_stride_h, grad_stride_l,
    lse_stride,
    copy_stride,
    key_bias_stride_b, key_bias_stride_h,
    heads,
    group,
    q_length,
    k_length,
    window,
    table_start,
    exponent_scale,
    zero,  # 0, which the compiler must not know: a load at zero * step stays in the walk
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLICE_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_KEY_BIAS: tl.constexpr,
    HAS_FIRST_KEY: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
    IN_LOOP: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The diagonals of one band of one head of one sequence."""
    # near bands have the most tiles, and they come first
    offset = k_length - q_length
    shift = (BLOCK_N - offset % BLOCK_N) % BLOCK_N  # makes blocks of keys begin at multiples
    base = (tl.program_id(0) - (BLOCK_M // BLOCK_N - 1)) * BLOCK_N - shift
    batch_head = tl.program_id(1)
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    key_head = head // group
    q_base = q_ptr + batch * q_stride_b + head * q_stride_h
    k_base = k_ptr + batch * k_stride_b + key_head * k_stride_h
    v_base = v_ptr + batch * v_stride_b + key_head * v_stride_h
    grad_base = grad_ptr + batch * grad_stride_b + head * grad_stride_h
    lse_row = lse_ptr + batch_head.to(tl.int64) * lse_stride
    delta_row = delta_ptr + batch_head.to(tl.int64) * lse_stride
    reach = tl.minimum(window, tl.load(visible_ptr + head))
    offsets_m = tl.arange(0, BLOCK_M)
    offsets_n = tl.arange(0, BLOCK_N)
    bias_row = bias_ptr
    weight_row = weight_ptr
    tile = row_offsets(table_start - base - offsets_m, copy_stride)[:, None] + offsets_n[None, :]
    if HAS_BIAS:
        bias_row += head * 4 * copy_stride
    if HAS_WEIGHT:
        weight_row += head * 4 * copy_stride

    # the highest and lowest entry of the band decide which of the two launches takes it
    reference = 0.0
    mine = 1
    if HAS_BIAS and not HAS_WEIGHT:
        offsets = tl.arange(0, 2 * BLOCK_M)
        nearest = table_start - (base - BLOCK_N + 1)
        used = offsets < BLOCK_M + BLOCK_N - 1
        values = tl.load(bias_row + nearest - offsets, mask=used, other=NOTHING)
        highest = tl.max(values, 0)
        lowest = tl.min(tl.where(values > LOWEST, values, highest), 0)
        steep = tl.where(highest - lowest > MAX_RANGE, 1, 0)
        mine = steep if IN_LOOP else 1 - steep
        reference = 0.5 * (highest + lowest)
    # the first query block that reaches back to a block of keys
    first = tl.cdiv(tl.maximum(base - offset, 0), BLOCK_M) * BLOCK_M
    last = tl.where(base - BLOCK_N + 1 < reach, q_length, first)
    end = first + (last - first) * mine

    key_bias_row = key_bias_ptr
    own_row = own_ptr
    if HAS_KEY_BIAS:
        key_bias_row += batch * key_bias_stride_b + head * key_bias_stride_h
        own_row += batch * key_bias_stride_b + head * key_bias_stride_h + offset
    bias_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    weight_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for m_start in tl.range(first, end, BLOCK_M, num_stages=STAGES):
        m_start = tl.multiple_of(m_start, BLOCK_M)
        rows = m_start + offsets_m
        n_start = tl.multiple_of(offset + m_start - base, BLOCK_N)
        if SLICE_D == BLOCK_D:
            q = load_rows(q_base, m_start, q_length, q_stride_l, BLOCK_M, HEAD_DIM, BLOCK_D)
            k = load_rows(k_base, n_start, k_length, k_stride_l, BLOCK_N, HEAD_DIM, BLOCK_D)
            product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        else:
            product = sliced_product(
                q_base, m_start, q_length, q_stride_l, k_base, n_start, k_length, k_stride_l,
                BLOCK_M, BLOCK_N, HEAD_DIM, SLICE_D, PRECISION,
            )  # fmt: skip
        if HAS_WEIGHT:
            x = product * tl.load(weight_row + m_start * zero + tile, cache_modifier=".ca")
        else:
            x = product * exponent_scale
        if HAS_BIAS and IN_LOOP:
            x += tl.load(bias_row + m_start * zero + tile, cache_modifier=".ca")
        if HAS_KEY_BIAS:
            keys = n_start + offsets_n
            key_bias = tl.load(key_bias_row + keys, mask=keys < k_length, other=0.0)
            own = tl.load(own_row + rows, mask=rows < q_length, other=0.0)
            x += (key_bias[None, :] - own[:, None]) * LOG2E
        if HAS_FIRST_KEY:
            keys = n_start + offsets_n
            first_key_row = first_key_ptr + batch * q_length
            first_key = tl.load(first_key_row + rows, mask=rows < q_length, other=0)
            x = tl.where(keys[None, :] >= first_key[:, None], x, NOTHING)
        lse = tl.load(lse_row + rows)
        if not IN_LOOP:
            lse -= reference
        p = tl.math.exp2(x - lse[:, None])
        if SLICE_D == BLOCK_D:
            grad = load_rows(
                grad_base, m_start, q_length, grad_stride_l, BLOCK_M, HEAD_DIM, BLOCK_D
            )
            v = load_rows(v_base, n_start, k_length, v_stride_l, BLOCK_N, HEAD_DIM, BLOCK_D)
            dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        else:
            dp = sliced_product(
                grad_base, m_start, q_length, grad_stride_l, v_base, n_start, k_length, v_stride_l,
                BLOCK_M, BLOCK_N, HEAD_DIM, SLICE_D, PRECISION,
            )  # fmt: skip
        ds = p * (dp - tl.load(delta_row + rows)[:, None])
        if BIAS_GRAD:
            bias_sum += ds
        if WEIGHT_GRAD:
            weight_sum += ds * product

    distance = base + offsets_m[:, None] - offsets_n[None, :]
    valid = (distance >= 0) & (distance < window)
    line = batch_head.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    if BIAS_GRAD:
        if not IN_LOOP:
            bias = tl.load(bias_row + tile)
            bias_sum *= tl.math.exp2(bias - reference)
            valid = valid & (bias > LOWEST)
        sums = tl.where(valid, bias_sum, 0.0)
        store_diagonals(dbias_ptr + line * 2 * BLOCK_M, sums, mine, BLOCK_M, BLOCK_N)
    if WEIGHT_GRAD:
        sums = tl.where(valid, weight_sum, 0.0)
        store_diagonals(dweight_ptr + line * 2 * BLOCK_M, sums, mine, BLOCK_M, BLOCK_N)
