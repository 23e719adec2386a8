"""Gradients of the tables over distance: one program per band of distances, no atomics.

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
MAX_RANGE below and above the band's entries neither factor overflows, and what underflows is
below 1e-18 of a probability. A band in which the table falls by more (ALiBi's steepest heads) is
left to a second launch, which reads the table inside the walk (IN_LOOP), as does every call with
a weight table. Each band belongs to one of the two launches; the other does nothing for it.

Features are not constant along a diagonal. Within their reach dQ's kernel sums the bias's gradient
as that of one more feature (triton_features), and the bands leave those distances out. With a
weight table that does not do, as its gradient needs the product of each score: the bands then
write the features' term of each tile to a strip and read it back, and a program takes several
bands. A row scale puts every band into the second launch.
"""

# Triton reads the signatures below; their run-time arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, name-defined"

from __future__ import annotations

from megatron.engines.triton_features import fill_strip, query_strip_tile
from megatron.engines.triton_forward import (
    NUMBERS,
    HeadTerms,
    Sizes,
    head_of_program,
    head_terms,
    kept,
    line_of,
    load_along,
    load_hashes,
    tile_product,
    tile_scores,
)
from megatron.engines.triton_problem import LOWEST, NOTHING, row_offsets
from megatron.engines.triton_runtime import constant, jit, tl

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
    rows = (terms.own, terms.first_key, terms.row_scale, terms.hash_low, terms.hash_high)
    return HeadTerms(None, terms.weight, terms.key_bias, *rows, terms.features, terms.reach)


@jit()
def band_scores(product, terms, m_start, n_start, zero, tile, added, sizes, C: tl.constexpr):
    """x of the tile that begins at this query and key."""
    rows = m_start + tl.arange(0, C.BLOCK_M)
    keys = n_start + tl.arange(0, C.BLOCK_N)
    own = load_along(terms.own, rows, 1)
    key_bias = load_along(terms.key_bias, keys, 0)
    first_key = load_along(terms.first_key, rows, 1)
    row_scale = load_along(terms.row_scale, rows, 1)
    x, _ = tile_scores(
        product, terms, m_start * zero, tile, rows[:, None], keys[None, :],
        (own, key_bias, first_key, row_scale), added, sizes, C,
    )  # fmt: skip
    return x, row_scale


@jit()
def band_strip(features, m_start, base, C: tl.constexpr):
    """The features' term of the band's tile whose first query is `m_start`, by way of the strip."""
    tl.debug_barrier()  # the tile before is read
    top = base + C.BLOCK_M - 1
    fill_strip(features.strip, features, m_start, top, C.BLOCK_M + C.BLOCK_N, C.BLOCK_M, C)
    tl.debug_barrier()
    return tl.load(query_strip_tile(features, 0, C)).to(tl.float32)


@jit()
def band_walk(
    sums, lines, terms, lse_row, delta_row, base, first, end, reference, zero, tile, sizes,
    STRIP: tl.constexpr, BIAS_GRAD: tl.constexpr, WEIGHT_GRAD: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The sums (of the bias's and of the weight's gradients) with the queries `first` to `end`."""
    bias_sum, weight_sum = sums
    q_line, k_line, v_line, grad_line = lines
    offset = sizes.k_length - sizes.q_length
    offsets_m = tl.arange(0, C.BLOCK_M)
    STAGES: tl.constexpr = 1 if STRIP else C.STAGES
    for m_start in tl.range(first, end, C.BLOCK_M, num_stages=STAGES):
        m_start = tl.multiple_of(m_start, C.BLOCK_M)
        n_start = tl.multiple_of(offset + m_start - base, C.BLOCK_N)
        added = band_strip(terms.features, m_start, base, C) if STRIP else None
        product = tile_product(q_line, m_start, k_line, n_start, C)
        x, row_scale = band_scores(product, terms, m_start, n_start, zero, tile, added, sizes, C)
        lse = tl.load(lse_row + (m_start + offsets_m))
        if reference is not None:
            lse -= reference
        p = tl.math.exp2(x - lse[:, None])
        dp = tile_product(grad_line, m_start, v_line, n_start, C)
        if terms.hash_low is not None:
            hashes = load_hashes(terms, m_start + offsets_m, 1)
            key = (n_start + tl.arange(0, C.BLOCK_N))[None, :]
            dp = kept(hashes, key, dp * C.KEPT_SCALE, C)
        ds = p * (dp - tl.load(delta_row + (m_start + offsets_m))[:, None])
        if terms.row_scale is not None:
            ds = ds * row_scale
        if BIAS_GRAD:
            bias_sum += ds
        if WEIGHT_GRAD:
            weight_sum += ds * product
    return bias_sum, weight_sum


@jit()
def store_sums(
    dbias_ptr, dweight_ptr, sums, bias_row, tile, line,
    base, nearest, window, reference, mine, C: tl.constexpr,
):  # fmt: skip
    """The sums of the walk as line `line` of the two tables' bands."""
    bias_sum, weight_sum = sums
    distance = base + tl.arange(0, C.BLOCK_M)[:, None] - tl.arange(0, C.BLOCK_N)[None, :]
    valid = (distance >= nearest) & (distance < window)
    if dbias_ptr is not None:
        if reference is not None:
            bias = tl.load(bias_row + tile)
            bias_sum *= tl.math.exp2(bias - reference)
            valid = valid & (bias > LOWEST)
        bias_sum = tl.where(valid, bias_sum, 0.0)
        store_diagonals(dbias_ptr + line * 2 * C.BLOCK_M, bias_sum, mine, C.BLOCK_M, C.BLOCK_N)
    if dweight_ptr is not None:
        weight_sum = tl.where(valid, weight_sum, 0.0)
        store_diagonals(dweight_ptr + line * 2 * C.BLOCK_M, weight_sum, mine, C.BLOCK_M, C.BLOCK_N)


@jit()
def band_block(
    q, k, v, grad, terms, lse_ptr, delta_ptr, dbias_ptr, dweight_ptr, number, bands, batch, head,
    zero, sizes, IN_LOOP: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The diagonals of band `number` of one head of one sequence."""
    # near bands have the most tiles, and they come first
    offset = sizes.k_length - sizes.q_length
    shift = (C.BLOCK_N - offset % C.BLOCK_N) % C.BLOCK_N  # makes key blocks begin at multiples
    base = (number - (C.BLOCK_M // C.BLOCK_N - 1)) * C.BLOCK_N - shift
    key_head = head // sizes.group
    lines = (
        line_of(q, batch, head, sizes.q_length),
        line_of(k, batch, key_head, sizes.k_length),
        line_of(v, batch, key_head, sizes.k_length),
        line_of(grad, batch, head, sizes.q_length),
    )
    rows = (batch * sizes.heads + head) * terms.row_stride
    whole = head_terms(terms, batch, head, sizes, C)
    walked = whole if IN_LOOP else without_bias(whole)
    offsets_m = tl.arange(0, C.BLOCK_M)
    entries = row_offsets(sizes.table_start - base - offsets_m, terms.copy_stride)
    tile = entries[:, None] + tl.arange(0, C.BLOCK_N)[None, :]

    # the highest and lowest entry of the band decide which of the two launches takes it
    reference = None
    mine = 1
    if terms.bias is not None and terms.weight is None and terms.row_scale is None:
        middle, mine = band_reference(whole.bias, base, sizes.table_start, IN_LOOP, C)
        reference = None if IN_LOOP else middle
    # the first query block that reaches back to a block of keys
    first = tl.cdiv(tl.maximum(base - offset, 0), C.BLOCK_M) * C.BLOCK_M
    last = tl.where(base - C.BLOCK_N + 1 < whole.reach, sizes.q_length, first)
    nearest = 0
    STRIPS: tl.constexpr = terms.features is not None and terms.weight is not None
    if terms.features is not None and not STRIPS:
        # nearer distances have their gradient from dQ, by the features
        nearest = whole.features.extent
        last = tl.where(base + C.BLOCK_M > nearest, last, first)
    end = first + (last - first) * mine

    BIAS_GRAD: tl.constexpr = dbias_ptr is not None
    WEIGHT_GRAD: tl.constexpr = dweight_ptr is not None
    zeros = tl.zeros([C.BLOCK_M, C.BLOCK_N], tl.float32)
    sums = (zeros, zeros)
    if STRIPS:
        near = tl.where(base - C.BLOCK_N + 1 < whole.features.extent, end, first)
        sums = band_walk(
            sums, lines, walked, lse_ptr + rows, delta_ptr + rows, base, first, near,
            reference, zero, tile, sizes, True, BIAS_GRAD, WEIGHT_GRAD, C,
        )  # fmt: skip
        first = near
    sums = band_walk(
        sums, lines, walked, lse_ptr + rows, delta_ptr + rows, base, first, end,
        reference, zero, tile, sizes, False, BIAS_GRAD, WEIGHT_GRAD, C,
    )  # fmt: skip
    store_sums(
        dbias_ptr, dweight_ptr, sums, whole.bias, tile,
        (batch * sizes.heads + head) * bands + number,
        base, nearest, sizes.window, reference, mine, C,
    )  # fmt: skip


@jit(do_not_specialize=[*NUMBERS, "bands", "zero"])
def attention_band_kernel(
    q, k, v, grad,  # Rows
    terms,  # with reversed tables, as in the forward
    lse_ptr, delta_ptr,
    dbias_ptr, dweight_ptr,  # [batch * heads, bands, 2, BLOCK_M] fp32; or None
    heads, group, q_length, k_length, window, table_start, exponent_scale,
    bands,
    zero,  # 0, which the compiler must not know: a load at zero * step stays in the walk
    IN_LOOP: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """The diagonals of one band of one head of one sequence; by strips, of every so many bands."""
    sizes = Sizes(heads, group, q_length, k_length, window, table_start, exponent_scale)
    batch, head = head_of_program()
    if terms.features is None or terms.weight is None:
        band_block(
            q, k, v, grad, terms, lse_ptr, delta_ptr, dbias_ptr, dweight_ptr,
            tl.program_id(0), bands, batch, head, zero, sizes, IN_LOOP, C,
        )  # fmt: skip
    else:
        items = bands * tl.load(terms.features.counts + 1)
        for item in tl.range(tl.program_id(0), items, tl.num_programs(0)):
            band_block(
                q, k, v, grad, terms, lse_ptr, delta_ptr, dbias_ptr, dweight_ptr,
                item % bands, bands, (item // bands).to(tl.int64), head, zero, sizes, IN_LOOP, C,
            )  # fmt: skip
