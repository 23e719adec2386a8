"""Backward kernels of the Triton attention engine: delta, dK and dV, dQ; no atomics.

Every gradient has one owner. A program of `attention_dkdv_kernel` owns a block of keys and walks
the queries that see it; a program of `attention_dq_kernel` owns a block of queries and walks the
keys that it sees. Both compute the scores again: seven matrix products per tile where one kernel
would need five. In return nothing is added to memory: no workspace, no atomic operation, the same
bits on every run, and as many programs as there are blocks. The gradients of the tables have a
third kernel (triton_band).

Tiles of dK and dV are transposed, [key, query], so that the keys' rows stay with their warps.
"""

# Triton reads the signatures below; their run-time arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, name-defined"

from __future__ import annotations

from megatron.engines.triton_compat import jit, tl
from megatron.engines.triton_forward import load_rows, store_rows, tile_scores
from megatron.engines.triton_tables import NOTHING, row_offsets

__all__ = ["attention_delta_kernel", "attention_dkdv_kernel", "attention_dq_kernel"]


@jit(do_not_specialize=["heads", "q_length"])
def attention_delta_kernel(
    out_ptr,
    grad_ptr,
    delta_ptr,  # [batch * heads, lse_stride], 0 past the end
    lse_ptr,  # the same shape: rows past the end are closed here
    out_stride_b, out_stride_h, out_stride_l,
    grad_stride_b, grad_stride_h, grad_stride_l,
    lse_stride,
    heads,
    q_length,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
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
    line = batch_head.to(tl.int64) * lse_stride
    tl.store(delta_ptr + line + rows, delta)
    # a row past the end has probabilities of 0, like one that sees nothing
    tl.store(lse_ptr + line + rows, tl.full([BLOCK_M], -NOTHING, tl.float32), rows >= q_length)


@jit(
    do_not_specialize=[
        "heads", "group", "q_length", "k_length", "window", "table_start", "exponent_scale",
        "key_bias_stride_b", "key_bias_stride_h", "dk_factor",
    ]
)  # fmt: skip
def attention_dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    bias_ptr,  # [heads, 4, copy_stride]: shifted copies of bias * log2(e), not reversed; or None
    weight_ptr,
    key_bias_ptr,  # [batch or 1, heads or 1, k_length] fp32; or None
    own_ptr,
    first_key_ptr,  # [batch, first_key_stride] int32; or None
    query_end_ptr,  # [batch, key blocks] int32: one past the last query that sees a block; or None
    visible_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    dkey_bias_ptr,  # [batch * heads, k_length] fp32; or None
    q_stride_b, q_stride_h, q_stride_l,
    k_stride_b, k_stride_h, k_stride_l,
    v_stride_b, v_stride_h, v_stride_l,
    grad_stride_b, grad_stride_h, grad_stride_l,
    dk_stride_b, dk_stride_h, dk_stride_l,
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
    dk_factor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_KEY_BIAS: tl.constexpr,
    KEY_BIAS_GRAD: tl.constexpr,
    HAS_FIRST_KEY: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys of one key head, over all query heads that share it."""
    # the first key blocks are seen by the most queries, and they come first
    n_start = tl.program_id(0) * BLOCK_N
    key_heads = heads // group
    batch = (tl.program_id(1) // key_heads).to(tl.int64)
    key_head = (tl.program_id(1) % key_heads).to(tl.int64)
    offset = k_length - q_length
    offsets_m = tl.arange(0, BLOCK_M)
    offsets_n = tl.arange(0, BLOCK_N)
    keys = n_start + offsets_n
    k_base = k_ptr + batch * k_stride_b + key_head * k_stride_h
    v_base = v_ptr + batch * v_stride_b + key_head * v_stride_h
    k = load_rows(k_base, n_start, k_length, k_stride_l, BLOCK_N, HEAD_DIM, BLOCK_D)
    v = load_rows(v_base, n_start, k_length, v_stride_l, BLOCK_N, HEAD_DIM, BLOCK_D)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    entries = row_offsets(table_start + offset - keys, copy_stride)
    first = tl.maximum(n_start - offset, 0) // BLOCK_M * BLOCK_M
    last = q_length
    if HAS_FIRST_KEY:
        last = tl.load(query_end_ptr + batch * tl.num_programs(0) + tl.program_id(0))

    for member in range(0, group):
        head = key_head * group + member
        line = batch * heads + head
        q_base = q_ptr + batch * q_stride_b + head * q_stride_h
        grad_base = grad_ptr + batch * grad_stride_b + head * grad_stride_h
        lse_row = lse_ptr + line * lse_stride
        delta_row = delta_ptr + line * lse_stride
        bias_row = bias_ptr
        weight_row = weight_ptr
        if HAS_BIAS:
            bias_row += head * 4 * copy_stride
        if HAS_WEIGHT:
            weight_row += head * 4 * copy_stride
        own_row = own_ptr
        key_bias = 0.0
        if HAS_KEY_BIAS:
            key_bias_line = batch * key_bias_stride_b + head * key_bias_stride_h
            own_row = own_ptr + key_bias_line + offset
            key_bias_row = key_bias_ptr + key_bias_line
            key_bias = tl.load(key_bias_row + keys, mask=keys < k_length, other=0.0)[:, None]
        dkey_bias = tl.zeros([BLOCK_N], tl.float32)
        # one past the last query that the last key of the block can reach
        reach = tl.minimum(window, tl.load(visible_ptr + head))
        end = tl.minimum(n_start + BLOCK_N - 1 + reach - offset, last)
        for m_start in tl.range(first, end, BLOCK_M, num_stages=STAGES):
            m_start = tl.multiple_of(m_start, BLOCK_M)
            rows = m_start + offsets_m
            q = load_rows(q_base, m_start, q_length, q_stride_l, BLOCK_M, HEAD_DIM, BLOCK_D)
            product = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            weight = 0.0
            own = 0.0
            first_key = 0
            if HAS_WEIGHT:
                weight = tl.load(
                    weight_row + (entries[:, None] + rows[None, :]), cache_modifier=".ca"
                )
            if HAS_KEY_BIAS:
                own = tl.load(own_row + rows, mask=rows < q_length, other=0.0)[None, :]
            if HAS_FIRST_KEY:
                first_key_row = first_key_ptr + batch * q_length
                first_key = tl.load(first_key_row + rows, mask=rows < q_length, other=0)[None, :]
            x = tile_scores(
                product, bias_row, m_start, entries[:, None] + offsets_m[None, :], weight,
                (offset + rows)[None, :], keys[:, None], own, key_bias,
                first_key, window, exponent_scale,
                HAS_BIAS, HAS_WEIGHT, HAS_KEY_BIAS, HAS_FIRST_KEY, HAS_WINDOW,
            )  # fmt: skip
            p = tl.math.exp2(x - tl.load(lse_row + rows)[None, :])
            grad = load_rows(
                grad_base, m_start, q_length, grad_stride_l, BLOCK_M, HEAD_DIM, BLOCK_D
            )
            dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
            ds = p * (dp - tl.load(delta_row + rows)[None, :])
            if KEY_BIAS_GRAD:
                dkey_bias += tl.sum(ds, 1)
            if HAS_WEIGHT:
                ds = ds * weight
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        if KEY_BIAS_GRAD:
            tl.store(dkey_bias_ptr + line * k_length + keys, dkey_bias, mask=keys < k_length)

    dk_base = dk_ptr + batch * dk_stride_b + key_head * dk_stride_h
    dv_base = dv_ptr + batch * dk_stride_b + key_head * dk_stride_h
    store_rows(dk_base, n_start, k_length, dk_stride_l, dk * dk_factor, HEAD_DIM, BLOCK_D)
    store_rows(dv_base, n_start, k_length, dk_stride_l, dv, HEAD_DIM, BLOCK_D)


@jit(
    do_not_specialize=[
        "heads", "group", "q_length", "k_length", "window", "table_start", "exponent_scale",
        "key_bias_stride_b", "key_bias_stride_h", "dq_factor",
    ]
)  # fmt: skip
def attention_dq_kernel(
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
    dq_ptr,
    q_stride_b, q_stride_h, q_stride_l,
    k_stride_b, k_stride_h, k_stride_l,
    v_stride_b, v_stride_h, v_stride_l,
    grad_stride_b, grad_stride_h, grad_stride_l,
    dq_stride_b, dq_stride_h, dq_stride_l,
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
    dq_factor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_KEY_BIAS: tl.constexpr,
    HAS_FIRST_KEY: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries of one head."""
    m_start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    batch_head = tl.program_id(1)
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    key_head = head // group
    q_base = q_ptr + batch * q_stride_b + head * q_stride_h
    k_base = k_ptr + batch * k_stride_b + key_head * k_stride_h
    v_base = v_ptr + batch * v_stride_b + key_head * v_stride_h
    grad_base = grad_ptr + batch * grad_stride_b + head * grad_stride_h
    reach = tl.minimum(window, tl.load(visible_ptr + head))

    position = k_length - q_length + m_start
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
        first = tl.maximum(first, tl.load(first_key_row + m_start))
    first = first // BLOCK_N * BLOCK_N

    q = load_rows(q_base, m_start, q_length, q_stride_l, BLOCK_M, HEAD_DIM, BLOCK_D)
    grad = load_rows(grad_base, m_start, q_length, grad_stride_l, BLOCK_M, HEAD_DIM, BLOCK_D)
    lse = tl.load(lse_ptr + batch_head.to(tl.int64) * lse_stride + rows)
    delta = tl.load(delta_ptr + batch_head.to(tl.int64) * lse_stride + rows)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n_start in tl.range(first, end, BLOCK_N, num_stages=STAGES):
        n_start = tl.multiple_of(n_start, BLOCK_N)
        keys = n_start + offsets_n
        k = load_rows(k_base, n_start, k_length, k_stride_l, BLOCK_N, HEAD_DIM, BLOCK_D)
        product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
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
        p = tl.math.exp2(x - lse[:, None])
        v = load_rows(v_base, n_start, k_length, v_stride_l, BLOCK_N, HEAD_DIM, BLOCK_D)
        dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        if HAS_WEIGHT:
            ds = ds * weight
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    dq_base = dq_ptr + batch * dq_stride_b + head * dq_stride_h
    store_rows(dq_base, m_start, q_length, dq_stride_l, dq * dq_factor, HEAD_DIM, BLOCK_D)
