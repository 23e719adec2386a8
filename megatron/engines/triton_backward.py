"""Backward kernels of the Triton attention engine: delta, dK and dV, dQ; no atomics.

One program writes each gradient element. A program of `attention_dkdv_kernel` has a block of keys
and loops over the queries that see it; a program of `attention_dq_kernel` has a block of queries
and loops over the keys that it sees. Both recompute the scores: seven matrix products per tile
where one kernel would need five. In return there is no workspace and no atomic operation, every run
gives the same bits, and there are as many programs as blocks. The gradients of the tables have a
third kernel (triton_bands).

Tiles of dK and dV are transposed, [key, query], so that the keys' rows stay with their warps.
"""

# Triton reads the signatures below; their run-time arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, name-defined"

from __future__ import annotations

from megatron.engines.triton_features import (
    CHUNK,
    STRIP_ROWS,
    fill_key_strips,
    in_dtype,
    key_strip_scores,
    query_strip_tile,
    strip_gradients,
)
from megatron.engines.triton_forward import (
    LOG2E,
    NUMBERS,
    Sizes,
    block_of_item,
    block_of_program,
    head_of_program,
    head_terms,
    kept,
    line_of,
    load_along,
    load_block,
    load_hashes,
    load_tile,
    query_scores,
    store_tile,
    tile_scores,
)
from megatron.engines.triton_problem import NOTHING, row_offsets
from megatron.engines.triton_runtime import jit, tl


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
    sums, k_tile, v_tile, keys, q_line, grad_line, lse_row, delta_row, terms, entries,
    first, end, strips_first, sizes, KEY_BIAS_GRAD: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The sums (dK, dV, and of the key bias's gradient) with the queries from `first` to `end`.

    `strips_first`: the query with which the strips begin; None for queries beyond the features.
    """
    dk, dv, dkey_bias = sums
    offset = sizes.k_length - sizes.q_length
    offsets_m = tl.arange(0, C.BLOCK_M)
    key_bias = load_along(terms.key_bias, keys, 1)
    for m_start in tl.range(first, end, C.BLOCK_M, num_stages=C.STAGES):
        m_start = tl.multiple_of(m_start, C.BLOCK_M)
        rows = m_start + offsets_m
        q_tile = load_tile(q_line, m_start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D)
        product = tl.dot(k_tile, tl.trans(q_tile), input_precision=C.PRECISION)
        own = load_along(terms.own, rows, 0)
        first_key = load_along(terms.first_key, rows, 0)
        row_scale = load_along(terms.row_scale, rows, 0)
        added = None
        if strips_first is not None:
            added = key_strip_scores(terms.features, strips_first, m_start, C)
        x, factor = tile_scores(
            product, terms, m_start, entries[:, None] + offsets_m[None, :],
            (offset + rows)[None, :], keys[:, None],
            (own, key_bias, first_key, row_scale), added, sizes, C,
        )  # fmt: skip
        p = tl.math.exp2(x - tl.load(lse_row + rows)[None, :])
        grad_tile = load_tile(grad_line, m_start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D)
        weights = p
        if terms.hash_low is not None:
            hashes = load_hashes(terms, rows, 0)
            weights = kept(hashes, keys[:, None], p, C)
        dv = tl.dot(weights.to(grad_tile.dtype), grad_tile, dv, input_precision=C.PRECISION)
        dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision=C.PRECISION)
        if terms.hash_low is not None:
            dp = kept(hashes, keys[:, None], dp * C.KEPT_SCALE, C)
        ds = p * (dp - tl.load(delta_row + rows)[None, :])
        if terms.row_scale is not None:
            ds = ds * row_scale
        if KEY_BIAS_GRAD:
            dkey_bias += tl.sum(ds, 1)
        if terms.weight is not None:
            ds = ds * factor
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=C.PRECISION)
    return dk, dv, dkey_bias


@jit()
def key_block_walks(
    sums, k_tile, v_tile, keys, q_line, grad_line, lse_row, delta_row, terms, entries,
    first, end, n_start, sizes, KEY_BIAS_GRAD: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """`key_block_walk` over all queries; those that the features reach by strips, in chunks."""
    dk, dv, dkey_bias = sums
    if terms.features is not None:
        offset = sizes.k_length - sizes.q_length
        # one past the last query within the features' reach of the last key
        near = tl.minimum(n_start + C.BLOCK_N - 1 + terms.features.extent - offset, end)
        for chunk in tl.range(first // STRIP_ROWS * STRIP_ROWS, near, CHUNK):
            chunk_end = tl.minimum(chunk + CHUNK, near)
            fill_key_strips(terms.features, chunk, chunk_end, n_start, offset, C)
            dk, dv, dkey_bias = key_block_walk(
                (dk, dv, dkey_bias), k_tile, v_tile, keys, q_line, grad_line, lse_row, delta_row,
                terms, entries, tl.maximum(chunk, first), chunk_end, chunk, sizes, KEY_BIAS_GRAD, C,
            )  # fmt: skip
        first = tl.maximum(tl.cdiv(near, C.BLOCK_M) * C.BLOCK_M, first)
    return key_block_walk(
        (dk, dv, dkey_bias), k_tile, v_tile, keys, q_line, grad_line, lse_row, delta_row, terms,
        entries, first, end, None, sizes, KEY_BIAS_GRAD, C,
    )  # fmt: skip


@jit()
def dkdv_block(
    q, k, v, grad, dk, dv, terms, query_end_ptr, lse_ptr, delta_ptr, dkey_bias_ptr,
    number, blocks, batch, key_head, sizes, dk_factor, C: tl.constexpr,
):  # fmt: skip
    """dK and dV of block `number` of the keys of one key head."""
    n_start = number * C.BLOCK_N
    offset = sizes.k_length - sizes.q_length
    keys = n_start + tl.arange(0, C.BLOCK_N)
    k_line = line_of(k, batch, key_head, sizes.k_length)
    v_line = line_of(v, batch, key_head, sizes.k_length)
    k_tile = load_tile(k_line, n_start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D)
    v_tile = load_tile(v_line, n_start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D)
    dk_sum = tl.zeros([C.BLOCK_N, C.BLOCK_D], tl.float32)
    dv_sum = tl.zeros([C.BLOCK_N, C.BLOCK_D], tl.float32)
    entries = row_offsets(sizes.table_start + offset - keys, terms.copy_stride)
    first = tl.maximum(n_start - offset, 0) // C.BLOCK_M * C.BLOCK_M
    last = sizes.q_length
    if query_end_ptr is not None:
        last = tl.load(query_end_ptr + batch * blocks + number)

    for member in range(0, sizes.group):
        head = key_head * sizes.group + member
        line = batch * sizes.heads + head
        own_terms = head_terms(terms, batch, head, sizes, C)
        # one past the last query that the last key of the block can reach
        end = tl.minimum(n_start + C.BLOCK_N - 1 + own_terms.reach - offset, last)
        q_line = line_of(q, batch, head, sizes.q_length)
        grad_line = line_of(grad, batch, head, sizes.q_length)
        lse_row = lse_ptr + line * terms.row_stride
        delta_row = delta_ptr + line * terms.row_stride
        dkey_bias = tl.zeros([C.BLOCK_N], tl.float32)
        dk_sum, dv_sum, dkey_bias = key_block_walks(
            (dk_sum, dv_sum, dkey_bias), k_tile, v_tile, keys, q_line, grad_line, lse_row,
            delta_row, own_terms, entries, first, end, n_start, sizes, dkey_bias_ptr is not None, C,
        )  # fmt: skip
        if dkey_bias_ptr is not None:
            places = dkey_bias_ptr + line * sizes.k_length + keys
            tl.store(places, dkey_bias, mask=keys < sizes.k_length)

    dk_line = line_of(dk, batch, key_head, sizes.k_length)
    dv_line = line_of(dv, batch, key_head, sizes.k_length)
    store_tile(dk_line, n_start, dk_sum * dk_factor, C.HEAD_DIM, C.BLOCK_D)
    if terms.row_hashes is not None:
        dv_sum *= C.KEPT_SCALE
    store_tile(dv_line, n_start, dv_sum, C.HEAD_DIM, C.BLOCK_D)


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
    """dK and dV of a block of keys of one key head, over all query heads that share it.

    With features, of every so many of the key head's blocks.
    """
    sizes = Sizes(heads, group, q_length, k_length, window, table_start, exponent_scale)
    batch, key_head = head_of_program()
    if terms.features is None:
        # the first key blocks are seen by the most queries, and they come first
        dkdv_block(
            q, k, v, grad, dk, dv, terms, query_end_ptr, lse_ptr, delta_ptr, dkey_bias_ptr,
            tl.program_id(0), tl.num_programs(0), batch, key_head, sizes, dk_factor, C,
        )  # fmt: skip
    else:
        blocks = tl.cdiv(k_length, C.BLOCK_N)
        items = blocks * tl.load(terms.features.counts + 1)
        for item in tl.range(tl.program_id(0), items, tl.num_programs(0)):
            dkdv_block(
                q, k, v, grad, dk, dv, terms, query_end_ptr, lse_ptr, delta_ptr, dkey_bias_ptr,
                item % blocks, blocks, (item // blocks).to(tl.int64), key_head, sizes, dk_factor, C,
            )  # fmt: skip


@jit()
def dq_walk(
    sums, q_tile, grad_tile, k_line, v_line, terms, block, lse, delta, first, end, strip, sizes,
    SCALE_GRAD: tl.constexpr, STRIP_GRAD: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The sums (dQ and, of the row scale's gradient, dS * x) with the keys `first` to `end`."""
    dq_sum, scale_sum = sums
    for n_start in tl.range(first, end, C.BLOCK_N, num_stages=C.STAGES):
        n_start = tl.multiple_of(n_start, C.BLOCK_N)
        k_tile = load_tile(k_line, n_start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D)
        product = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
        added = None if strip is None else tl.load(strip + n_start).to(tl.float32)
        x, factor = query_scores(product, terms, block, n_start, added, sizes, C)
        p = tl.math.exp2(x - lse[:, None])
        v_tile = load_tile(v_line, n_start, C.BLOCK_N, C.HEAD_DIM, C.BLOCK_D)
        dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision=C.PRECISION)
        if terms.hash_low is not None:
            key = (n_start + tl.arange(0, C.BLOCK_N))[None, :]
            dp = kept(block.hashes, key, dp * C.KEPT_SCALE, C)
        ds = p * (dp - delta[:, None])
        if SCALE_GRAD:
            scale_sum += tl.sum(ds * x, 1)  # masked: 0 * NOTHING
        if terms.row_scale is not None:
            ds = ds * block.row_scale
        if STRIP_GRAD:
            tl.store(in_dtype(strip, k_tile.dtype) + n_start, ds.to(k_tile.dtype))
        if terms.weight is not None:
            ds = ds * factor
        dq_sum = tl.dot(ds.to(k_tile.dtype), k_tile, dq_sum, input_precision=C.PRECISION)
    return dq_sum, scale_sum


@jit()
def dq_block(
    q, k, v, grad, dq, terms, lse_ptr, delta_ptr, dscale_ptr, dquery_ptr, share_ptr,
    m_start, batch, head, sizes, dq_factor, C: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries of one head, and what else belongs to its rows."""
    k_line, v_line, own_terms, block, near = load_block(k, v, terms, m_start, batch, head, sizes, C)
    q_line = line_of(q, batch, head, sizes.q_length)
    grad_line = line_of(grad, batch, head, sizes.q_length)
    q_tile = load_tile(q_line, m_start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D)
    grad_tile = load_tile(grad_line, m_start, C.BLOCK_M, C.HEAD_DIM, C.BLOCK_D)
    line = batch * sizes.heads + head
    places = line * terms.row_stride + block.rows
    lse = tl.load(lse_ptr + places)
    delta = tl.load(delta_ptr + places)
    dq_sum = tl.zeros([C.BLOCK_M, C.BLOCK_D], tl.float32)
    SCALE_GRAD: tl.constexpr = dscale_ptr is not None
    scale_sum = tl.zeros([C.BLOCK_M], tl.float32)
    sums = dq_walk(
        (dq_sum, scale_sum), q_tile, grad_tile, k_line, v_line, own_terms, block, lse, delta,
        block.first, near, None, sizes, SCALE_GRAD, False, C,
    )  # fmt: skip
    if terms.features is not None:
        strip = query_strip_tile(own_terms.features, near, C)
        sums = dq_walk(
            sums, q_tile, grad_tile, k_line, v_line, own_terms, block, lse, delta,
            near, block.end, strip, sizes, SCALE_GRAD, dquery_ptr is not None, C,
        )  # fmt: skip
    dq_sum, scale_sum = sums
    dq_line = line_of(dq, batch, head, sizes.q_length)
    store_tile(dq_line, m_start, dq_sum * dq_factor, C.HEAD_DIM, C.BLOCK_D)
    if dscale_ptr is not None:
        scale = tl.load(own_terms.row_scale + block.rows)
        tl.store(dscale_ptr + places, scale_sum / (scale * LOG2E))
    if dquery_ptr is not None:
        keys = tl.cdiv(block.end - near, C.BLOCK_N) * C.BLOCK_N
        strip_gradients(
            in_dtype(own_terms.features.strip, q.ptr.dtype.element_ty), own_terms.features,
            dquery_ptr + line * terms.row_stride * C.FEATURES, share_ptr,
            m_start, block.position + C.BLOCK_M - 1 - near, keys, C,
        )  # fmt: skip


@jit(do_not_specialize=[*NUMBERS, "dq_factor"])
def attention_dq_kernel(
    q, k, v, grad, dq,  # Rows
    terms,  # with reversed tables, as in the forward
    lse_ptr, delta_ptr,
    dscale_ptr,  # [batch * heads, row_stride] fp32: of the row scale; or None
    dquery_ptr,  # [batch * heads, row_stride, FEATURES] fp32: of the query features; or None
    share_ptr,  # [heads, programs, features.line, FEATURES] fp32, zeros: of the distance features
    heads, group, q_length, k_length, window, table_start, exponent_scale, dq_factor,
    C: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries of one head; with features, of every so many of its blocks."""
    sizes = Sizes(heads, group, q_length, k_length, window, table_start, exponent_scale)
    if terms.features is None:
        batch, head, m_start = block_of_program(C)
        dq_block(
            q, k, v, grad, dq, terms, lse_ptr, delta_ptr, dscale_ptr, None, None,
            m_start, batch, head, sizes, dq_factor, C,
        )  # fmt: skip
    else:
        _, head = head_of_program()
        if share_ptr is not None:
            program = head * tl.num_programs(0) + tl.program_id(0)
            share_ptr += program * terms.features.line * C.FEATURES
        items = tl.cdiv(q_length, C.BLOCK_M) * tl.load(terms.features.counts + 1)
        for item in tl.range(tl.program_id(0), items, tl.num_programs(0)):
            batch, m_start = block_of_item(item, q_length, C.BLOCK_M)
            dq_block(
                q, k, v, grad, dq, terms, lse_ptr, delta_ptr, dscale_ptr, dquery_ptr, share_ptr,
                m_start, batch, head, sizes, dq_factor, C,
            )  # fmt: skip
