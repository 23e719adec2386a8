"""Backward kernel of the Triton attention engine: five matrix products per tile, no atomics.

Who owns what. `splits` programs share one head of one sequence. Program r takes the key blocks
r, r + splits, r + 2 splits, ... one after the other; dK and dV of a key block live in registers.
dQ and the table gradients cross key blocks, so each program adds them up in rows of its own of a
workspace (plain load, add, store), and the host sums the `splits` rows in a fixed order. Every
number is added in the same order on every run: the gradients are deterministic.

Why the plain additions are safe. For one key block the query blocks are all different, and so are
all addresses of dQ and of the table sums below: the inner loop touches each of them once, and the
compiler may prefetch across its iterations. Between two key blocks the same addresses come again:
there stands a barrier. No other program ever touches them.

The gradient of a table. d = position of the query - position of the key, so an entry collects a
diagonal. In a square of B keys and B queries, rolling row j left by j turns diagonals to columns:

      i  0 1 2 3            column c   0 1 2 3
    j 0  a b c d              j 0      a b c d         dS^T[j, i] = element of key j, query i
      1  e f g h    roll        1      f g h e'        no mark: i - j = c      distance base + c
      2  i j k l   ----->       2      k l i'j'        mark ':  i - j = c - B  distance base + c - B
      3  m n o p                3      p m'n'o'

Column sums of the unmarked part belong to distances base .. base+B-1, those of the marked part to
base-B .. base-1. The next query block has base' = base + B, so its marked sums join the unmarked
sums of this one: they wait in `carry`, and each step adds one complete row of B distances. A tile
holds more keys than queries: it is a stack of such squares (`SQUARES`), each with sums of its own.
"""

# Triton reads the signatures below; their run-time arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, name-defined"

from __future__ import annotations

from megatron.engines.triton_compat import jit, tl
from megatron.engines.triton_forward import (
    first_term,
    load_rows,
    masked_scores,
    sliced_product,
    tile_mask,
)

__all__ = ["attention_backward_kernel", "attention_delta_kernel"]


@jit(do_not_specialize=["heads", "q_length"])
def attention_delta_kernel(
    out_ptr,
    grad_ptr,
    delta_ptr,  # [batch * heads, lse_stride], 0 past the end
    out_stride_b,
    out_stride_h,
    out_stride_l,
    grad_stride_b,
    grad_stride_h,
    grad_stride_l,
    lse_stride,
    heads,
    q_length,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """delta = sum over D of out * grad_out: what the softmax's backward subtracts from each row."""
    m_start = tl.program_id(0) * BLOCK_M
    batch_head = tl.program_id(1)
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    out_base = out_ptr + batch * out_stride_b + head * out_stride_h
    grad_base = grad_ptr + batch * grad_stride_b + head * grad_stride_h
    out = load_rows(out_base, m_start, q_length, out_stride_l, BLOCK_M, HEAD_DIM, BLOCK_D)
    grad = load_rows(grad_base, m_start, q_length, grad_stride_l, BLOCK_M, HEAD_DIM, BLOCK_D)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    rows = m_start + tl.arange(0, BLOCK_M)
    tl.store(delta_ptr + batch_head.to(tl.int64) * lse_stride + rows, delta)


@jit()
def diagonal_sums(tile, KEYS: tl.constexpr, QUERIES: tl.constexpr):
    """Sums over the diagonals of each square of a tile [key j, query i], as [squares, QUERIES].

    The first result has i - j = c in column c, the second i - j = c - QUERIES.
    """
    SQUARES: tl.constexpr = KEYS // QUERIES
    j = tl.arange(0, KEYS)[:, None] & (QUERIES - 1)
    c = tl.arange(0, QUERIES)[None, :]
    rolled = tl.gather(tile, (j + c) & (QUERIES - 1), 1)
    wrapped = j + c >= QUERIES
    near = tl.reshape(tl.where(wrapped, 0.0, rolled), (SQUARES, QUERIES, QUERIES))
    far = tl.reshape(tl.where(wrapped, rolled, 0.0), (SQUARES, QUERIES, QUERIES))
    return tl.sum(near, 1), tl.sum(far, 1)


@jit()
def add_to_rows(rows_ptr, start, values, row_stride, SQUARES: tl.constexpr, QUERIES: tl.constexpr):
    """rows[s, start - s * QUERIES :][:QUERIES] += values[s], rows that this program alone uses."""
    s = tl.arange(0, SQUARES)[:, None]
    pointers = rows_ptr + start + s * (row_stride - QUERIES) + tl.arange(0, QUERIES)[None, :]
    tl.store(pointers, tl.load(pointers, cache_modifier=".cg") + values)


@jit()
def add_to_dq(
    dq_base,
    m_start,
    q_length,
    ds,
    k,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """This program's share of dQ for one query block."""
    rows = tl.arange(0, QUERIES)
    dims = tl.arange(0, BLOCK_D)
    tile = dq_base + tl.cast(m_start, tl.int64) * HEAD_DIM
    pointers = tile + rows[:, None] * HEAD_DIM + dims[None, :]
    mask = tile_mask(m_start + rows, q_length, dims, HEAD_DIM, BLOCK_D)
    sums = tl.load(pointers, mask=mask, other=0.0, cache_modifier=".cg")
    tl.store(pointers, tl.dot(ds, k, sums, input_precision=PRECISION), mask=mask)


@jit(do_not_specialize=["heads", "q_length", "k_length", "window", "scale", "exponent_scale"])
def attention_backward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    bias_ptr,  # [heads, table_stride], padded, divided by the scale; or None
    weight_ptr,  # [heads, table_stride], padded; or None
    visible_ptr,  # [heads] int32: distances worth visiting
    lse_ptr,
    delta_ptr,
    dq_ptr,  # [splits, batch * heads, q_length, D] fp32, zero
    dk_ptr,  # [batch * heads, k_length, D]
    dv_ptr,
    dbias_ptr,  # [splits, batch * heads, squares, table_stride] fp32, zero; or None
    dweight_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_l,
    k_stride_b,
    k_stride_h,
    k_stride_l,
    v_stride_b,
    v_stride_h,
    v_stride_l,
    grad_stride_b,
    grad_stride_h,
    grad_stride_l,
    dk_stride_b,
    dk_stride_h,
    dk_stride_l,
    lse_stride,
    table_stride,
    heads,
    q_length,
    k_length,
    window,
    scale,
    exponent_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLICE_D: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    TABLE_PAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dK, dV of every `splits`-th key block of one head, and this program's share of the rest."""
    SQUARES: tl.constexpr = KEYS // QUERIES
    split = tl.program_id(0)
    batch_head = tl.program_id(1)
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    # which of the workspace rows is this program's
    share = split.to(tl.int64) * tl.num_programs(1) + batch_head
    q_base = q_ptr + batch * q_stride_b + head * q_stride_h
    k_base = k_ptr + batch * k_stride_b + head * k_stride_h
    v_base = v_ptr + batch * v_stride_b + head * v_stride_h
    grad_base = grad_ptr + batch * grad_stride_b + head * grad_stride_h
    dk_base = dk_ptr + batch * dk_stride_b + head * dk_stride_h
    dv_base = dv_ptr + batch * dk_stride_b + head * dk_stride_h
    dq_base = dq_ptr + share * q_length * HEAD_DIM
    lse_row = lse_ptr + batch_head.to(tl.int64) * lse_stride
    delta_row = delta_ptr + batch_head.to(tl.int64) * lse_stride
    bias_row = bias_ptr
    weight_row = weight_ptr
    if HAS_BIAS:
        bias_row = bias_ptr + head * table_stride + TABLE_PAD
    if HAS_WEIGHT:
        weight_row = weight_ptr + head * table_stride + TABLE_PAD
    dbias_row = dbias_ptr
    dweight_row = dweight_ptr
    if BIAS_GRAD:
        dbias_row = dbias_ptr + share * SQUARES * table_stride + TABLE_PAD
    if WEIGHT_GRAD:
        dweight_row = dweight_ptr + share * SQUARES * table_stride + TABLE_PAD
    reach = tl.minimum(window, tl.load(visible_ptr + head))

    offset = k_length - q_length
    keys = tl.arange(0, KEYS)
    queries = tl.arange(0, QUERIES)
    dims = tl.arange(0, BLOCK_D)
    for n_start in range(split * KEYS, k_length, tl.num_programs(0) * KEYS):
        k = load_rows(k_base, n_start, k_length, k_stride_l, KEYS, HEAD_DIM, BLOCK_D)
        if SLICE_D == BLOCK_D:
            v = load_rows(v_base, n_start, k_length, v_stride_l, KEYS, HEAD_DIM, BLOCK_D)
        dk = tl.zeros([KEYS, BLOCK_D], tl.float32)
        dv = tl.zeros([KEYS, BLOCK_D], tl.float32)
        bias_carry = tl.zeros([SQUARES, QUERIES], tl.float32)
        weight_carry = tl.zeros([SQUARES, QUERIES], tl.float32)
        first = tl.maximum(n_start - offset, 0) // QUERIES * QUERIES
        # one past the last query that the last key of the block can reach
        end = tl.minimum(n_start + KEYS - 1 + reach - offset, q_length)
        for m_start in range(first, end, QUERIES):
            base = offset + m_start - n_start  # distance between the two blocks
            query = (base + queries)[None, :]
            key = keys[:, None]
            q = load_rows(q_base, m_start, q_length, q_stride_l, QUERIES, HEAD_DIM, BLOCK_D)
            product = first_term(query, key, bias_row, HAS_BIAS, HAS_WEIGHT)
            if SLICE_D == BLOCK_D:
                product = tl.dot(k, tl.trans(q), product, input_precision=PRECISION)
            else:
                product = sliced_product(
                    k_base, n_start, k_length, k_stride_l, q_base, m_start, q_length, q_stride_l,
                    product, HEAD_DIM, SLICE_D, PRECISION,
                )  # fmt: skip
            t = masked_scores(
                product, query, key, bias_row, weight_row, window, HAS_BIAS, HAS_WEIGHT
            )
            lse = tl.load(lse_row + m_start + queries)
            delta = tl.load(delta_row + m_start + queries)
            p = tl.math.exp2(t * exponent_scale - lse[None, :])
            grad = load_rows(
                grad_base, m_start, q_length, grad_stride_l, QUERIES, HEAD_DIM, BLOCK_D
            )
            dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
            dp = tl.zeros([KEYS, QUERIES], tl.float32)
            if SLICE_D == BLOCK_D:
                dp = tl.dot(v, tl.trans(grad), dp, input_precision=PRECISION)
            else:
                dp = sliced_product(
                    v_base, n_start, k_length, v_stride_l, grad_base, m_start, q_length,
                    grad_stride_l, dp, HEAD_DIM, SLICE_D, PRECISION,
                )  # fmt: skip
            ds = p * (dp - delta[None, :])
            if BIAS_GRAD:
                near, far = diagonal_sums(ds, KEYS, QUERIES)
                far += bias_carry
                add_to_rows(dbias_row, base - QUERIES, far, table_stride, SQUARES, QUERIES)
                bias_carry = near
            if WEIGHT_GRAD:
                near, far = diagonal_sums(ds * product, KEYS, QUERIES)
                far += weight_carry
                add_to_rows(dweight_row, base - QUERIES, far, table_stride, SQUARES, QUERIES)
                weight_carry = near
            if HAS_WEIGHT:
                ds = ds * tl.load(weight_row + (query - key))
            ds = ds.to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision=PRECISION)
            add_to_dq(
                dq_base, m_start, q_length, tl.trans(ds), k, QUERIES, HEAD_DIM, BLOCK_D, PRECISION
            )
        # the unmarked sums of the last query block that was visited
        steps = tl.maximum(tl.cdiv(end - first, QUERIES), 1)
        last = offset + first + (steps - 1) * QUERIES - n_start
        if BIAS_GRAD:
            add_to_rows(dbias_row, last, bias_carry, table_stride, SQUARES, QUERIES)
        if WEIGHT_GRAD:
            add_to_rows(dweight_row, last, weight_carry, table_stride, SQUARES, QUERIES)
        tile = tl.cast(n_start, tl.int64) * dk_stride_l
        pointers = keys[:, None] * dk_stride_l + dims[None, :]
        mask = tile_mask(n_start + keys, k_length, dims, HEAD_DIM, BLOCK_D)
        tl.store(dk_base + tile + pointers, (dk * scale).to(dk_ptr.dtype.element_ty), mask=mask)
        tl.store(dv_base + tile + pointers, dv.to(dv_ptr.dtype.element_ty), mask=mask)
        # the next key block adds to the same rows of dQ and of the tables, from other threads
        tl.debug_barrier()
