"""The types of PTX registers as NumPy's, and what single instructions compute on arrays of them.

The translated kernels call these functions by name (see program.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.findings import PtxError

Array = np.ndarray[Any, Any]

f2, f4, f8 = np.float16, np.float32, np.float64
i1, i2, i4, i8 = np.int8, np.int16, np.int32, np.int64
u1, u2, u4, u8 = np.uint8, np.uint16, np.uint32, np.uint64
DTYPE: dict[str, Any] = {
    "b8": u1, "u8": u1, "s8": i1, "b16": u2, "u16": u2, "s16": i2, "b32": u4, "u32": u4, "s32": i4,
    "b64": u8, "u64": u8, "s64": i8, "f32": f4, "f64": f8, "f16": f2, "pred": np.bool_,
}  # fmt: skip
WIDTH = {kind: np.dtype(dtype).itemsize for kind, dtype in DTYPE.items()}
WIDTH |= {"bf16": 2, "f16x2": 4, "bf16x2": 4}
BITS: dict[int, Any] = {1: u1, 2: u2, 4: u4, 8: u8}  # by width in bytes
HALF_KINDS = ("bf16", "bf16x2", "f16", "f16x2")
_TF32_BITS = u4(0xFFFFE000)
_SMALLEST_NORMAL = f4(1.1754943508222875e-38)


def code_of(dtype: Any) -> str:
    """The name by which generated code calls a dtype: f4, u8, ..."""
    return np.dtype(dtype).str[1:]


# Floats of 16 bits and TF32


def halves(x: Array, kind: str) -> Array:
    """Pairs of 16-bit floats, low half first, as fp32: [..., 2]."""
    if kind == "bf16":
        pairs = np.ascontiguousarray(x).view(u2).astype(u4)
        return (pairs << u4(16)).view(f4).reshape(*x.shape, 2)
    return np.ascontiguousarray(x).view(f2).astype(f4).reshape(*x.shape, 2)


def to_bf16(x: Array) -> Array:
    """fp32 to the bits of bf16, to nearest even."""
    bits = x.view(u4)
    up = (bits.astype(u8) + u8(0x7FFF) + ((bits >> u4(16)) & u4(1)).astype(u8)) >> u8(16)
    return np.where(np.isnan(x), u2(0x7FFF), up.astype(u2))


def bf16_value(bits: Array) -> Array:
    return (bits.astype(u4) << u4(16)).view(f4)


def tf32_value(bits: Array) -> Array:
    """What a tensor core reads of an fp32 register."""
    return (bits & _TF32_BITS).view(f4)


def round_to_tf32(x: Array) -> Array:
    """The bits, to nearest, ties away from zero."""
    bits = x.view(u4)
    return np.where(np.isfinite(x), (bits + u4(0x1000)) & _TF32_BITS, bits)


def pack_bf16(high: Array, low: Array) -> Array:
    return (to_bf16(high).astype(u4) << u4(16)) | to_bf16(low).astype(u4)


def pack_f16(high: Array, low: Array) -> Array:
    return (high.astype(f2).view(u2).astype(u4) << u4(16)) | low.astype(f2).view(u2).astype(u4)


def in_halves(function: Callable[..., Array], kind: str, packed: bool, *args: Array) -> Array:
    """A function of bf16 or fp16 numbers, single or packed: computed in fp32 and rounded."""
    if packed:
        numbers = [halves(x, kind) for x in args]
    elif kind == "bf16":
        numbers = [bf16_value(x) for x in args]
    else:
        numbers = [x.view(f2).astype(f4) for x in args]
    result = np.ascontiguousarray(function(*numbers).astype(f4))
    bits = to_bf16(result) if kind == "bf16" else result.astype(f2).view(u2)
    return bits.reshape(-1).view(u4) if packed else bits


# Floats of 32 bits


def flush(x: Array) -> Array:
    """Subnormal numbers become 0 (.ftz)."""
    return np.where(np.abs(x) < _SMALLEST_NORMAL, np.copysign(f4(0), x), x)


def fma(a: Array, b: Array, c: Array) -> Array:
    return (a.astype(f8) * b.astype(f8) + c.astype(f8)).astype(f4)


# Integers


def divide(a: Array, b: Array) -> Array:
    if (b == 0).any():
        raise PtxError("integer division by zero")
    if a.dtype.itemsize == 4:
        quotient = np.abs(a.astype(f8)) // np.abs(b.astype(f8))
    else:
        quotient = np.abs(a) // np.abs(b)
    signed = a.dtype.kind == "i"
    return (np.sign(a) * np.sign(b) * quotient if signed else quotient).astype(a.dtype)


def shift_left(a: Array, b: Array) -> Array:
    bits = a.dtype.itemsize * 8
    b = np.minimum(b, u4(bits)).astype(a.dtype)
    return np.where(b >= bits, a.dtype.type(0), a << (b % a.dtype.type(bits)))


def shift_right(a: Array, b: Array) -> Array:
    bits = a.dtype.itemsize * 8
    b = np.minimum(b, u4(bits)).astype(a.dtype)
    zero = a.dtype.type(0)
    fill = np.where(a < 0, a.dtype.type(-1), zero) if a.dtype.kind == "i" else zero
    return np.where(b >= bits, fill, a >> np.minimum(b, a.dtype.type(bits - 1)))


def funnel_shift(low: Array, high: Array, amount: Array, left: bool, wrap: bool) -> Array:
    n = (amount & u4(31)) if wrap else np.minimum(amount, u4(32))
    both = (high.astype(u8) << u8(32)) | low.astype(u8)
    if left:
        return ((both << n.astype(u8)) >> u8(32)).astype(u4)
    return (both >> n.astype(u8)).astype(u4)


def extract_field(a: Array, position: Array, length: Array) -> Array:
    signed = a.dtype.kind == "i"
    wide = i8 if signed else u8
    start = np.minimum(position & u4(255), u4(32)).astype(wide)
    n = np.minimum(length & u4(255), u4(32)).astype(wide)
    if not signed:
        return ((a.astype(u8) >> start) & ((u8(1) << n) - u8(1))).astype(a.dtype)
    value = (a.astype(i8) >> start) & ((i8(1) << n) - i8(1))
    sign = i8(1) << np.maximum(n - 1, 0)
    return np.where(n == 0, 0, (value ^ sign) - sign).astype(a.dtype)


def insert_field(a: Array, b: Array, position: Array, length: Array) -> Array:
    start, n = (position & u4(255)).astype(u8), (length & u4(255)).astype(u8)
    mask = (((u8(1) << n) - u8(1)) << start) & u8(0xFFFFFFFF)
    return ((b.astype(u8) & ~mask) | ((a.astype(u8) << start) & mask)).astype(u4)


def permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    words = [np.ascontiguousarray(x).view(u1).reshape(-1, 4) for x in (a, b)]
    data = np.concatenate(words, 1)
    selector = np.broadcast_to(selector, a.shape).astype(i8)
    out = np.empty((len(a), 4), u1)
    rows = np.arange(len(a))
    for i in range(4):
        chosen = (selector >> (4 * i)) & 15
        value = data[rows, chosen & 7]
        out[:, i] = np.where(chosen & 8, (value.view(i1) >> 7).view(u1), value)
    return out.view(u4).reshape(-1)


def logic_of_three(a: Array, b: Array, c: Array, table: int) -> Array:
    out = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


# Branches


class DivergedError(Exception):
    """The CTAs of a gang branch differently; its argument says which of them branch."""


def uniform(taken: Array, line: int, threads: int) -> bool:
    """Whether all threads branch; an error if those of one CTA differ."""
    if taken.all():
        return True
    if not taken.any():
        return False
    each = taken.reshape(-1, threads)
    if (each.all(1) | ~each.any(1)).all():
        raise DivergedError(each[:, 0].tolist())
    raise PtxError(f"branch at ptx line {line} is not uniform in the CTA")
