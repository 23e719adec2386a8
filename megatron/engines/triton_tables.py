"""Tables over distance as the Triton kernels read them: four shifted copies, padded, in base 2.

A tile of scores needs, for every row, a run of neighbouring table entries, and the run moves by
one from row to row. cp.async copies 16 bytes from addresses that are multiples of 16, so a run
that begins anywhere must exist at such an address: copy r holds the table moved by r entries, and
a row reads from the copy in which its run is aligned.

    copy 0   b0 b1 b2 b3 | b4 b5 b6 b7 | ...       a run from b5 on is read from copy 1,
    copy 1   b1 b2 b3 b4 | b5 b6 b7 b8 | ...       where it begins a group of four
    copy 2   b2 b3 b4 b5 | b6 b7 b8 b9 | ...
    copy 3   b3 b4 b5 b6 | b7 b8 b9 .. | ...

Rows of queries (forward, dQ, bands) meet falling distances, and read the table reversed; rows of
keys (dK and dV) read it as it is.
"""

# Triton reads the kernels' signatures; their run-time arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, name-defined"

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.engines.triton_compat import Launch, cdiv, constant, jit, tl

__all__ = ["LOWEST", "NOTHING", "NO_SCORE", "PAD", "TableCopies", "row_offsets", "table_copies"]

COPIES = 4  # floats in 16 bytes
# entries on both sides of the distances in use: more than the rows and columns of any tile
PAD = 512
# a score that does not count, and the least maximum of a row: exp2(NOTHING - LOWEST) is 0
NO_SCORE = -1e30
NOTHING = constant(NO_SCORE)
LOWEST = constant(-1e28)
_BLOCK = 1024


@jit()
def row_offsets(start, copy_stride):
    """Where entry `start[i]` of a table is, in the copy in which its address is aligned."""
    return (start & 3) * copy_stride + (start >> 2) * 4


@jit(do_not_specialize=["used", "start", "factor"])
def table_copies_kernel(
    table_ptr,
    out_ptr,  # [heads, 4, copy_stride]
    table_stride,
    copy_stride,
    used,
    start,
    factor,
    REVERSED: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One stretch of one copy of one head's table, multiplied by `factor`."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    copy = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    distance = start - (entry + copy) if REVERSED else entry + copy - start
    mask = (distance >= 0) & (distance < used)
    value = tl.load(table_ptr + head * table_stride + distance, mask=mask, other=0.0)
    value = value.to(tl.float32) * factor
    # a distance that the table forbids with -inf is a finite NOTHING; NaN stays what it is
    value = tl.where(mask, tl.where(value < NOTHING, NOTHING, value), FILL)
    line = (head * tl.num_programs(1) + copy) * copy_stride
    tl.store(out_ptr + line + entry, value, mask=entry < copy_stride)


@dataclass(frozen=True)
class TableCopies:
    """A table for the kernels: entry `start` of copy 0 is distance 0."""

    copies: Tensor  # [heads, 4, copy_stride] fp32
    start: int


def layout(k_length: int, reverse: bool) -> tuple[int, int]:
    """(start, copy_stride) of the copies for keys of this length."""
    length = cdiv(k_length, 16) * 16
    return (length + PAD if reverse else PAD), length + 2 * PAD


def table_copies(
    table: Tensor, used: int, k_length: int, *, reverse: bool, fill: float, factor: float
) -> tuple[Launch, TableCopies]:
    """The launch that fills the copies of `table[:, :used] * factor`, and the copies."""
    start, stride = layout(k_length, reverse)
    table = table.detach()
    table = table if table.stride(1) == 1 else table.contiguous()
    heads = table.shape[0]
    copies = torch.empty(heads, COPIES, stride, dtype=torch.float32, device=table.device)
    arguments = (table, copies, table.stride(0), stride, used, start, factor)
    options = {"REVERSED": reverse, "FILL": fill, "BLOCK": _BLOCK, "num_warps": 4}
    options["enable_fp_fusion"] = True
    grid = (cdiv(stride, _BLOCK), COPIES, heads)
    return Launch(table_copies_kernel, grid, arguments, options), TableCopies(copies, start)
