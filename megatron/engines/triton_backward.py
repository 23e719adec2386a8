"""Backward kernels of the Triton attention engine: delta, dK and dV, dQ, tables; no atomics.

One program writes each gradient element. A program of `attention_dkdv_kernel` has a block of keys
and loops over the queries that see it; a program of `attention_dq_kernel` has a block of queries
and loops over the keys that it sees. Both recompute the scores: seven matrix products per tile
where one kernel would need five. In return there is no workspace and no atomic operation, every run
gives the same bits, and there are as many programs as blocks. The gradients of the tables have a
third kernel, below.

Tiles of dK and dV are transposed, [key, query], so that the keys' rows stay with their warps.
"""

# Triton reads the signatures below; their run-time arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, name-defined"

from __future__ import annotations

from megatron.engines.triton_forward import (
    NUMBERS,
    HeadTerms,
    Sizes,
    head_of_program,
    head_terms,
    line_of,
    load_along,
    load_tile,
    query_block,
    query_scores,
    store_tile,
    tile_product,
    tile_scores,
)
from megatron.engines.triton_problem import LOWEST, NOTHING, row_offsets
from megatron.engines.triton_runtime import constant, jit, tl


@jit(do_not_specialize=["heads", "q_length"])
def attention_delta_kernel(
    out, grad,  # Rows
    delta_ptr,  # [batch * heads, row_stride], 0 past the end
    lse_ptr,  # the same shape: rows past the end are closed here
    row_stride,
    heads, q_length,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta = sum over D of out * grad_out: what the softmax's backward subtracts from each row."""
    m_start = tl.program_id(0) * BLOCK_M
    batch, head = head_of_program()
    out_line = line_of(out, batch, head, q_length)
    grad_line = line_of(grad, batch, head, q_length)
    out_tile = load_tile(out_line, m_start, BLOCK_M, HEAD_DIM, BLOCK_D)
    grad_tile = load_tile(grad_line, m_start, BLOCK_M, HEAD_DIM, BLOCK_D)
    delta = tl.sum(out_tile.to(tl.float32) * grad_tile.to(tl.float32), 1)
    rows = m_start + tl.arange(0, BLOCK_M)
    line = (batch * heads + head) * row_stride
    tl.store(delta_ptr + line + rows, delta)
    # a row past the end has probabilities of 0, like one that sees nothing
    tl.store(lse_ptr + line + rows, tl.full([BLOCK_M], -NOTHING, tl.float32), rows >= q_length)


@jit()
def key_block_walk(
    k_tile, v_tile, dk, dv, keys, q_line, grad_line, lse_row, delta_row, terms, entries,
    first, end, sizes, KEY_BIAS_GRAD: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One query head's share of dK and dV, added to both; and of the key bias's gradient."""
    offset = sizes.k_length - sizes.q_length
    offsets_m = tl.arange(0, C.BLOCK_M)
    dkey_bias = tl.zeros([C.BLOCK_N], tl.float32)
    key_bias = load_along(terms.key_bias, keys, 1)
    for m_start in tl.range(first, end, C.BLOCK_M, num_stages=C.STAGES):
        m_start = tl.multiple_of(m_start, C.BLOCK_M)
        rows = m_start + offsets_m
        q_tile = load_tile(q_line, m_start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D)
        product = tl.dot(k_tile, tl.trans(q_tile), input_precision=C.PRECISION)
        own = load_along(terms.own, rows, 0)
        first_key = load_along(terms.first_key, rows, 0)
        x, factor = tile_scores(
            product, terms, m_start, entries[:, None] + offsets_m[None, :],
            (offset + rows)[None, :], keys[:, None], (own, key_bias, first_key), sizes, C,
        )  # fmt: skip
        p = tl.math.exp2(x - tl.load(lse_row + rows)[None, :])
        grad_tile = load_tile(grad_line, m_start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D)
        dv = tl.dot(p.to(grad_tile.dtype), grad_tile, dv, input_precision=C.PRECISION)
        dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision=C.PRECISION)
        ds = p * (dp - tl.load(delta_row + rows)[None, :])
        if KEY_BIAS_GRAD:
            dkey_bias += tl.sum(ds, 1)
        if terms.weight is not None:
            ds = ds * factor
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=C.PRECISION)
    return dk, dv, dkey_bias


@jit(do_not_specialize=[*NUMBERS, "dk_factor"])
def attention_dkdv_kernel(
    q, k, v, grad, dk, dv,  # Rows
    terms,  # with tables that are not reversed
    query_end_ptr,  # [batch, key blocks] int32: one past the last query that sees a block; or None
    lse_ptr, delta_ptr,
    dkey_bias_ptr,  # [batch * heads, k_length] fp32; or None
    heads, group, q_length, k_length, window, table_start, exponent_scale, dk_factor,
    C: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys of one key head, over all query heads that share it."""
    sizes = Sizes(heads, group, q_length, k_length, window, table_start, exponent_scale)
    # the first key blocks are seen by the most queries, and they come first
    n_start = tl.program_id(0) * C.BLOCK_N
    batch, key_head = head_of_program()
    offset = k_length - q_length
    keys = n_start + tl.arange(0, C.BLOCK_N)
    k_line = line_of(k, batch, key_head, k_length)
    v_line = line_of(v, batch, key_head, k_length)
    k_tile = load_tile(k_line, n_start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D)
    v_tile = load_tile(v_line, n_start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D)
    dk_sum = tl.zeros([C.BLOCK_N, C.BLOCK_D], tl.float32)
    dv_sum = tl.zeros([C.BLOCK_N, C.BLOCK_D], tl.float32)
    entries = row_offsets(table_start + offset - keys, terms.copy_stride)
    first = tl.maximum(n_start - offset, 0) // C.BLOCK_M * C.BLOCK_M
    last = q_length
    if query_end_ptr is not None:
        last = tl.load(query_end_ptr + batch * tl.num_programs(0) + tl.program_id(0))

    for member in range(0, group):
        head = key_head * group + member
        line = batch * heads + head
        own_terms = head_terms(terms, batch, head, sizes)
        # one past the last query that the last key of the block can reach
        end = tl.minimum(n_start + C.BLOCK_N - 1 + own_terms.reach - offset, last)
        q_line = line_of(q, batch, head, q_length)
        grad_line = line_of(grad, batch, head, q_length)
        lse_row = lse_ptr + line * terms.row_stride
        delta_row = delta_ptr + line * terms.row_stride
        dk_sum, dv_sum, dkey_bias = key_block_walk(
            k_tile, v_tile, dk_sum, dv_sum, keys, q_line, grad_line, lse_row, delta_row,
            own_terms, entries, first, end, sizes, dkey_bias_ptr is not None, C,
        )  # fmt: skip
        if dkey_bias_ptr is not None:
            tl.store(dkey_bias_ptr + line * k_length + keys, dkey_bias, mask=keys < k_length)

    dk_line = line_of(dk, batch, key_head, k_length)
    dv_line = line_of(dv, batch, key_head, k_length)
    store_tile(dk_line, n_start, dk_sum * dk_factor, C.HEAD_DIM, C.BLOCK_D)
    store_tile(dv_line, n_start, dv_sum, C.HEAD_DIM, C.BLOCK_D)


@jit(do_not_specialize=[*NUMBERS, "dq_factor"])
def attention_dq_kernel(
    q, k, v, grad, dq,  # Rows
    terms,  # with reversed tables, as in the forward
    lse_ptr, delta_ptr,
    heads, group, q_length, k_length, window, table_start, exponent_scale, dq_factor,
    C: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries of one head."""
    sizes = Sizes(heads, group, q_length, k_length, window, table_start, exponent_scale)
    m_start = (tl.num_programs(0) - 1 - tl.program_id(0)) * C.BLOCK_M
    batch, head = head_of_program()
    k_line = line_of(k, batch, head // group, k_length)
    v_line = line_of(v, batch, head // group, k_length)
    own_terms = head_terms(terms, batch, head, sizes)
    block = query_block(m_start, own_terms, terms.copy_stride, sizes, C)
    q_line = line_of(q, batch, head, q_length)
    grad_line = line_of(grad, batch, head, q_length)
    q_tile = load_tile(q_line, m_start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D)
    grad_tile = load_tile(grad_line, m_start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D)
    places = (batch * heads + head) * terms.row_stride + block.rows
    lse = tl.load(lse_ptr + places)
    delta = tl.load(delta_ptr + places)
    dq_sum = tl.zeros([C.BLOCK_M, C.BLOCK_D], tl.float32)
    for n_start in tl.range(block.first, block.end, C.BLOCK_N, num_stages=C.STAGES):
        n_start = tl.multiple_of(n_start, C.BLOCK_N)
        k_tile = load_tile(k_line, n_start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D)
        product = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
        x, factor = query_scores(product, own_terms, block, n_start, sizes, C)
        p = tl.math.exp2(x - lse[:, None])
        v_tile = load_tile(v_line, n_start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D)
        dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision=C.PRECISION)
        ds = p * (dp - delta[:, None])
        if terms.weight is not None:
            ds = ds * factor
        dq_sum = tl.dot(ds.to(k_tile.dtype), k_tile, dq_sum, input_precision=C.PRECISION)
    dq_line = line_of(dq, batch, head, q_length)
    store_tile(dq_line, m_start, dq_sum * dq_factor, C.HEAD_DIM, C.BLOCK_D)


# Gradient of the tables over distance: one program per band of distances, no atomics.
#
# A table entry collects a diagonal of dS over all queries. All tiles whose first query and first
# key are `base` apart have the same distances in the same places, so a program owns one `base` of
# one head: it walks those tiles, adds dS up element by element in registers, and sums the diagonals
# once, at the end. In the walk a table gradient then costs one multiply-add per score.
#
#     key ->                    r - c = distance - base
#     q  0 1 2 3 ...            a program's tiles lie on a line from the upper left to the lower
#     |  . 0 1 2 3              right, here those marked 0, or 1, ...; tiles left of the diagonal
#     v  . . 0 1 2              and beyond the reach of the head are not visited
#
# The bias is constant along a diagonal, so it leaves the walk:
# dTable[d] = exp2(b[d] - ref) * sum of exp2(x - b[d] - lse + ref) * (dP - delta). With ref at most
# MAX_RANGE below and above the band's entries neither factor overflows, and what underflows is
# below 1e-18 of a probability. A band in which the table falls by more (ALiBi's steepest heads) is
# left to a second launch, which reads the table inside the walk (IN_LOOP), as does every call with
# a weight table. Each band belongs to one of the two launches; the other does nothing for it.

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


@jit()
def band_reference(bias_row, base, table_start, IN_LOOP: tl.constexpr, C: tl.constexpr):
    """The middle of the band's entries; 1 if their range leaves the band to this launch, else 0."""
    offsets = tl.arange(0, 2 * C.BLOCK_M)
    nearest = table_start - (base - C.BLOCK_N + 1)
    used = offsets < C.BLOCK_M + C.BLOCK_N - 1
    values = tl.load(bias_row + nearest - offsets, mask=used, other=NOTHING)
    highest = tl.max(values, 0)
    lowest = tl.min(tl.where(values > LOWEST, values, highest), 0)
    steep = tl.where(highest - lowest > MAX_RANGE, 1, 0)
    return 0.5 * (highest + lowest), steep if IN_LOOP else 1 - steep


@jit()
def without_bias(terms):
    """The terms of a walk that the bias has left."""
    return HeadTerms(None, terms.weight, terms.key_bias, terms.own, terms.first_key, terms.reach)


@jit()
def band_scores(product, terms, m_start, n_start, zero, tile, sizes, C: tl.constexpr):
    """x of the tile that begins at this query and key."""
    rows = m_start + tl.arange(0, C.BLOCK_M)
    keys = n_start + tl.arange(0, C.BLOCK_N)
    own = load_along(terms.own, rows, 1)
    key_bias = load_along(terms.key_bias, keys, 0)
    first_key = load_along(terms.first_key, rows, 1)
    x, _ = tile_scores(
        product, terms, m_start * zero, tile, rows[:, None], keys[None, :],
        (own, key_bias, first_key), sizes, C,
    )  # fmt: skip
    return x


@jit()
def store_sums(
    dbias_ptr, dweight_ptr, bias_sum, weight_sum, bias_row, tile,
    base, window, reference, mine, IN_LOOP: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The sums of the walk as the program's lines of the two tables' bands."""
    distance = base + tl.arange(0, C.BLOCK_M)[:, None] - tl.arange(0, C.BLOCK_N)[None, :]
    valid = (distance >= 0) & (distance < window)
    batch, head = head_of_program()
    line = (batch * tl.num_programs(1) + head) * tl.num_programs(0) + tl.program_id(0)
    if dbias_ptr is not None:
        if not IN_LOOP:
            bias = tl.load(bias_row + tile)
            bias_sum *= tl.math.exp2(bias - reference)
            valid = valid & (bias > LOWEST)
        sums = tl.where(valid, bias_sum, 0.0)
        store_diagonals(dbias_ptr + line * 2 * C.BLOCK_M, sums, mine, C.BLOCK_M, C.BLOCK_N)
    if dweight_ptr is not None:
        sums = tl.where(valid, weight_sum, 0.0)
        store_diagonals(dweight_ptr + line * 2 * C.BLOCK_M, sums, mine, C.BLOCK_M, C.BLOCK_N)


@jit(do_not_specialize=[*NUMBERS, "zero"])
def attention_band_kernel(
    q, k, v, grad,  # Rows
    terms,  # with reversed tables, as in the forward
    lse_ptr, delta_ptr,
    dbias_ptr, dweight_ptr,  # [batch * heads, bands, 2, BLOCK_M] fp32; or None
    heads, group, q_length, k_length, window, table_start, exponent_scale,
    zero,  # 0, which the compiler must not know: a load at zero * step stays in the walk
    IN_LOOP: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """The diagonals of one band of one head of one sequence."""
    sizes = Sizes(heads, group, q_length, k_length, window, table_start, exponent_scale)
    # near bands have the most tiles, and they come first
    offset = k_length - q_length
    shift = (C.BLOCK_N - offset % C.BLOCK_N) % C.BLOCK_N  # makes key blocks begin at multiples
    base = (tl.program_id(0) - (C.BLOCK_M // C.BLOCK_N - 1)) * C.BLOCK_N - shift
    batch, head = head_of_program()
    q_line = line_of(q, batch, head, q_length)
    k_line = line_of(k, batch, head // group, k_length)
    v_line = line_of(v, batch, head // group, k_length)
    grad_line = line_of(grad, batch, head, q_length)
    line = (batch * heads + head) * terms.row_stride
    whole = head_terms(terms, batch, head, sizes)
    walked = whole if IN_LOOP else without_bias(whole)
    offsets_m = tl.arange(0, C.BLOCK_M)
    offsets_n = tl.arange(0, C.BLOCK_N)
    entries = row_offsets(table_start - base - offsets_m, terms.copy_stride)
    tile = entries[:, None] + offsets_n[None, :]

    # the highest and lowest entry of the band decide which of the two launches takes it
    reference = 0.0
    mine = 1
    if terms.bias is not None and terms.weight is None:
        reference, mine = band_reference(whole.bias, base, table_start, IN_LOOP, C)
    # the first query block that reaches back to a block of keys
    first = tl.cdiv(tl.maximum(base - offset, 0), C.BLOCK_M) * C.BLOCK_M
    last = tl.where(base - C.BLOCK_N + 1 < whole.reach, q_length, first)
    end = first + (last - first) * mine

    bias_sum = tl.zeros([C.BLOCK_M, C.BLOCK_N], tl.float32)
    weight_sum = tl.zeros([C.BLOCK_M, C.BLOCK_N], tl.float32)
    for m_start in tl.range(first, end, C.BLOCK_M, num_stages=C.STAGES):
        m_start = tl.multiple_of(m_start, C.BLOCK_M)
        n_start = tl.multiple_of(offset + m_start - base, C.BLOCK_N)
        product = tile_product(q_line, m_start, k_line, n_start, C)
        x = band_scores(product, walked, m_start, n_start, zero, tile, sizes, C)
        places = line + (m_start + offsets_m)
        lse = tl.load(lse_ptr + places)
        if not IN_LOOP:
            lse -= reference
        p = tl.math.exp2(x - lse[:, None])
        dp = tile_product(grad_line, m_start, v_line, n_start, C)
        ds = p * (dp - tl.load(delta_ptr + places)[:, None])
        if dbias_ptr is not None:
            bias_sum += ds
        if dweight_ptr is not None:
            weight_sum += ds * product

    store_sums(
        dbias_ptr, dweight_ptr, bias_sum, weight_sum, whole.bias, tile,
        base, window, reference, mine, IN_LOOP, C,
    )  # fmt: skip
