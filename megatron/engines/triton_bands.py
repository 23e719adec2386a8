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
as that of one more feature (triton_features), and the bands leave those distances out. A row scale
puts every band into the second launch.
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
def band_scores(product, terms, m_start, n_start, zero, tile, sizes, C: tl.constexpr):
    """x of the tile that begins at this query and key."""
    rows = m_start + tl.arange(0, C.BLOCK_M)
    keys = n_start + tl.arange(0, C.BLOCK_N)
    own = load_along(terms.own, rows, 1)
    key_bias = load_along(terms.key_bias, keys, 0)
    first_key = load_along(terms.first_key, rows, 1)
    row_scale = load_along(terms.row_scale, rows, 1)
    x, _ = tile_scores(
        product, terms, m_start * zero, tile, rows[:, None], keys[None, :],
        (own, key_bias, first_key, row_scale), None, sizes, C,
    )  # fmt: skip
    return x, row_scale


@jit()
def store_sums(
    dbias_ptr, dweight_ptr, bias_sum, weight_sum, bias_row, tile,
    base, nearest, window, reference, mine, IN_LOOP: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The sums of the walk as the program's lines of the two tables' bands."""
    distance = base + tl.arange(0, C.BLOCK_M)[:, None] - tl.arange(0, C.BLOCK_N)[None, :]
    valid = (distance >= nearest) & (distance < window)
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
    whole = head_terms(terms, batch, head, sizes, C)
    walked = whole if IN_LOOP else without_bias(whole)
    offsets_m = tl.arange(0, C.BLOCK_M)
    offsets_n = tl.arange(0, C.BLOCK_N)
    entries = row_offsets(table_start - base - offsets_m, terms.copy_stride)
    tile = entries[:, None] + offsets_n[None, :]

    # the highest and lowest entry of the band decide which of the two launches takes it
    reference = 0.0
    mine = 1
    if terms.bias is not None and terms.weight is None and terms.row_scale is None:
        reference, mine = band_reference(whole.bias, base, table_start, IN_LOOP, C)
    # the first query block that reaches back to a block of keys
    first = tl.cdiv(tl.maximum(base - offset, 0), C.BLOCK_M) * C.BLOCK_M
    last = tl.where(base - C.BLOCK_N + 1 < whole.reach, q_length, first)
    nearest = 0
    if terms.features is not None:
        # nearer distances have their gradient from dQ, by the features
        nearest = whole.features.extent
        last = tl.where(base + C.BLOCK_M > nearest, last, first)
    end = first + (last - first) * mine

    bias_sum = tl.zeros([C.BLOCK_M, C.BLOCK_N], tl.float32)
    weight_sum = tl.zeros([C.BLOCK_M, C.BLOCK_N], tl.float32)
    for m_start in tl.range(first, end, C.BLOCK_M, num_stages=C.STAGES):
        m_start = tl.multiple_of(m_start, C.BLOCK_M)
        n_start = tl.multiple_of(offset + m_start - base, C.BLOCK_N)
        product = tile_product(q_line, m_start, k_line, n_start, C)
        x, row_scale = band_scores(product, walked, m_start, n_start, zero, tile, sizes, C)
        places = line + (m_start + offsets_m)
        lse = tl.load(lse_ptr + places)
        if not IN_LOOP:
            lse -= reference
        p = tl.math.exp2(x - lse[:, None])
        dp = tile_product(grad_line, m_start, v_line, n_start, C)
        if terms.row_hashes is not None:
            hashes = load_hashes(whole, m_start + offsets_m, 1)
            dp = kept(hashes, (n_start + offsets_n)[None, :], dp * C.KEPT_SCALE, C)
        ds = p * (dp - tl.load(delta_ptr + places)[:, None])
        if terms.row_scale is not None:
            ds = ds * row_scale
        if dbias_ptr is not None:
            bias_sum += ds
        if dweight_ptr is not None:
            weight_sum += ds * product

    store_sums(
        dbias_ptr, dweight_ptr, bias_sum, weight_sum, whole.bias, tile,
        base, nearest, window, reference, mine, IN_LOOP, C,
    )  # fmt: skip
