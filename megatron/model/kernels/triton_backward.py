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
diagonal. Tiles are square (B x B), and rolling row j of dS^T left by j turns diagonals to columns:

      i  0 1 2 3            column c   0 1 2 3
    j 0  a b c d              j 0      a b c d         dS^T[j, i] = element of key j, query i
      1  e f g h    roll        1      f g h e'        no mark: i - j = c      distance base + c
      2  i j k l   ----->       2      k l i'j'        mark ':  i - j = c - B  distance base + c - B
      3  m n o p                3      p m'n'o'

Column sums of the unmarked part belong to distances base .. base+B-1, those of the marked part to
base-B .. base-1. The next query block has base' = base + B, so its marked sums join the unmarked
sums of this one: they wait in `carry`, and each step adds one complete row of B distances.
"""

# Triton reads the signatures below; their run-time arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, name-defined"

from __future__ import annotations


from megatron.model.kernels.triton_compat import jit, tl
from megatron.model.kernels.triton_forward import load_rows, masked_scores, tile_mask

__all__ = ["attention_backward_kernel", "attention_delta_kernel"]


@jit(do_not_specialize=["heads", "q_length"])
def attention_delta_kernel(
    out_ptr,
    grad_ptr,
    delta_ptr,  # [batch * heads, q_length]
    out_stride_b,
    out_stride_h,
    out_stride_l,
    grad_stride_b,
    grad_stride_h,
    grad_stride_l,
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
    delta_row = delta_ptr + batch_head.to(tl.int64) * q_length
    tl.store(delta_row + rows, delta, mask=rows < q_length)


@jit()
def diagonal_sums(tile, BLOCK: tl.constexpr):
    """Sums over the diagonals of a square tile [key j, query i]: (i - j = c, i - j = c - BLOCK)."""
    j = tl.arange(0, BLOCK)[:, None]
    c = tl.arange(0, BLOCK)[None, :]
    rolled = tl.gather(tile, (j + c) & (BLOCK - 1), 1)
    wrapped = j + c >= BLOCK
    near = tl.sum(tl.where(wrapped, 0.0, rolled), 0)
    far = tl.sum(tl.where(wrapped, rolled, 0.0), 0)
    return near, far


@jit()
def add_to_row(row_ptr, start, values, BLOCK: tl.constexpr):
    """row[start : start + BLOCK] += values, in memory that belongs to this program alone."""
    pointers = row_ptr + start + tl.arange(0, BLOCK)
    tl.store(pointers, tl.load(pointers, cache_modifier=".cg") + values)


@jit()
def add_to_dq(
    dq_base,
    m_start,
    ds,
    k,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """This program's share of dQ for one query block; its rows are padded to whole blocks."""
    rows = tl.arange(0, BLOCK)
    dims = tl.arange(0, BLOCK_D)
    tile = dq_base + tl.cast(m_start, tl.int64) * HEAD_DIM
    pointers = tile + rows[:, None] * HEAD_DIM + dims[None, :]
    mask = tile_mask(rows, BLOCK, dims, HEAD_DIM, BLOCK_D)
    share = tl.dot(ds, k, input_precision=PRECISION)
    sums = tl.load(pointers, mask=mask, other=0.0, cache_modifier=".cg")
    tl.store(pointers, sums + share, mask=mask)


@jit(do_not_specialize=["heads", "q_length", "k_length", "window", "scale", "exponent_scale"])
def attention_backward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    bias_ptr,  # [heads, table_stride], padded, divided by the scale; or None
    weight_ptr,  # [heads, table_stride], padded; or None
    visible_ptr,  # [heads] int32; or None
    lse_ptr,
    delta_ptr,
    dq_ptr,  # [splits, batch * heads, padded q_length, D] fp32, zero
    dk_ptr,  # [batch * heads, k_length, D]
    dv_ptr,
    dbias_ptr,  # [splits, batch * heads, table_stride] fp32, zero; or None
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
    table_stride,
    heads,
    q_length,
    k_length,
    window,
    scale,
    exponent_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    TABLE_PAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_VISIBLE: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dK, dV of every `splits`-th key block of one head, and this program's share of the rest."""
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
    dq_base = dq_ptr + share * (tl.cdiv(q_length, BLOCK) * BLOCK) * HEAD_DIM
    lse_row = lse_ptr + batch_head.to(tl.int64) * q_length
    delta_row = delta_ptr + batch_head.to(tl.int64) * q_length
    bias_row = bias_ptr
    weight_row = weight_ptr
    if HAS_BIAS:
        bias_row = bias_ptr + head * table_stride + TABLE_PAD
    if HAS_WEIGHT:
        weight_row = weight_ptr + head * table_stride + TABLE_PAD
    dbias_row = dbias_ptr
    dweight_row = dweight_ptr
    if BIAS_GRAD:
        dbias_row = dbias_ptr + share * table_stride + TABLE_PAD
    if WEIGHT_GRAD:
        dweight_row = dweight_ptr + share * table_stride + TABLE_PAD
    reach = window
    if HAS_VISIBLE:
        reach = tl.minimum(reach, tl.load(visible_ptr + head))

    offset = k_length - q_length
    inner = tl.arange(0, BLOCK)
    dims = tl.arange(0, BLOCK_D)
    for n_start in range(split * BLOCK, k_length, tl.num_programs(0) * BLOCK):
        k = load_rows(k_base, n_start, k_length, k_stride_l, BLOCK, HEAD_DIM, BLOCK_D)
        v = load_rows(v_base, n_start, k_length, v_stride_l, BLOCK, HEAD_DIM, BLOCK_D)
        dk = tl.zeros([BLOCK, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK, BLOCK_D], tl.float32)
        bias_carry = tl.zeros([BLOCK], tl.float32)
        weight_carry = tl.zeros([BLOCK], tl.float32)
        first = tl.maximum(n_start - offset, 0) // BLOCK * BLOCK
        # one past the last query that the last key of the block can reach
        end = tl.minimum(n_start + BLOCK - 1 + reach - offset, q_length)
        for m_start in range(first, end, BLOCK):
            base = offset + m_start - n_start  # distance between the two blocks
            q = load_rows(q_base, m_start, q_length, q_stride_l, BLOCK, HEAD_DIM, BLOCK_D)
            t, product = masked_scores(
                k, tl.trans(q), (base + inner)[None, :], inner[:, None], bias_row, weight_row, window,
                HAS_BIAS, HAS_WEIGHT, PRECISION,
            )  # fmt: skip
            queries = m_start + inner
            # rows past the end: +inf makes their probabilities exactly 0
            lse = tl.load(lse_row + queries, mask=queries < q_length, other=float("inf"))
            delta = tl.load(delta_row + queries, mask=queries < q_length, other=0.0)
            p = tl.math.exp2(t * exponent_scale - lse[None, :])
            grad = load_rows(
                grad_base, m_start, q_length, grad_stride_l, BLOCK, HEAD_DIM, BLOCK_D
            )
            dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
            ds = p * (dp - delta[None, :])
            if BIAS_GRAD:
                near, far = diagonal_sums(ds, BLOCK)
                add_to_row(dbias_row, base - BLOCK, bias_carry + far, BLOCK)
                bias_carry = near
            if WEIGHT_GRAD:
                near, far = diagonal_sums(ds * product, BLOCK)
                add_to_row(dweight_row, base - BLOCK, weight_carry + far, BLOCK)
                weight_carry = near
            if HAS_WEIGHT:
                ds = ds * tl.load(weight_row + ((base + inner)[None, :] - inner[:, None]))
            ds = ds.to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision=PRECISION)
            add_to_dq(
                dq_base, m_start, tl.trans(ds), k, BLOCK, HEAD_DIM, BLOCK_D, PRECISION
            )
        # the unmarked sums of the last query block that was visited
        last = offset + tl.maximum(tl.cdiv(end - first, BLOCK) - 1, 0) * BLOCK + first - n_start
        if BIAS_GRAD:
            add_to_row(dbias_row, last, bias_carry, BLOCK)
        if WEIGHT_GRAD:
            add_to_row(dweight_row, last, weight_carry, BLOCK)
        tile = tl.cast(n_start, tl.int64) * dk_stride_l
        pointers = inner[:, None] * dk_stride_l + dims[None, :]
        mask = tile_mask(n_start + inner, k_length, dims, HEAD_DIM, BLOCK_D)
        tl.store(dk_base + tile + pointers, (dk * scale).to(dk_ptr.dtype.element_ty), mask=mask)
        tl.store(dv_base + tile + pointers, dv.to(dv_ptr.dtype.element_ty), mask=mask)
        # the next key block adds to the same rows of dQ and of the tables, from other threads
        tl.debug_barrier()
