"""An attention call as the Triton kernels read it: layouts, dtypes, terms of queries and keys.

Everything here is tensors of O(length): nothing of the size of the scores.

Tables over distance are handed over as four shifted copies, padded, in base 2. A tile of scores
needs, for every row, a run of neighbouring table entries, and the run moves by one from row to
row. cp.async copies 16 bytes from addresses that are multiples of 16, so a run that begins anywhere
must exist at such an address: copy r holds the table moved by r entries, and a row reads from the
copy in which its run is aligned.

    copy 0   b0 b1 b2 b3 | b4 b5 b6 b7 | ...       a run from b5 on is read from copy 1,
    copy 1   b1 b2 b3 b4 | b5 b6 b7 b8 | ...       where it begins a group of four
    copy 2   b2 b3 b4 b5 | b6 b7 b8 b9 | ...
    copy 3   b3 b4 b5 b6 | b7 b8 b9 .. | ...

Along a row of queries (forward, dQ, bands) distances fall, so these kernels read the table
reversed; along a row of keys (dK and dV) they rise.
"""

# Triton reads the kernels' signatures; their run-time arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, name-defined"

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.engines.call import Call, key_origin, sink_rows
from megatron.engines.dropout import row_keys
from megatron.engines.triton_runtime import Launch, cdiv, constant, jit, next_power_of_2, tl
from megatron.engines.triton_tiles import ROW_MULTIPLE, SHARED_MEMORY

LOG2E = math.log2(math.e)
# rows are loaded 16 elements at a time, from addresses that are multiples of 16 bytes
ALIGNMENT = 16
COPIES = 4  # floats in 16 bytes
# entries on both sides of the distances in use: more than the rows and columns of any tile
PAD = 512
# a score that does not count, and the least maximum of a row: exp2(NOTHING - LOWEST) is 0
NO_SCORE = -1e30
NOTHING = constant(NO_SCORE)
LOWEST = constant(-1e28)
_BLOCK = 1024


class Rows(NamedTuple):
    """A tensor [B, H, L, D] in a kernel: where it is, and the strides of its first axes."""

    ptr: Any
    batch: int
    head: int
    row: int


class Terms(NamedTuple):
    """What makes scores out of products, in a kernel; None for what a call does not have.

    Rows and keys are padded, so that inner loops load them unmasked. All strides are multiples of
    16: they never make Triton compile another variant.
    """

    bias: Any  # [H, 4, copy_stride]: shifted copies of bias * log2(e)
    weight: Any  # the same of weight * scale * log2(e)
    key_bias: Any  # [B * H, key_stride] fp32
    own: Any  # [B * H, row_stride] fp32: what a query subtracts from its key biases
    first_key: Any  # [B, row_stride] int32
    visible: Any  # [H] int32: distances worth visiting
    row_scale: Any  # [B * H, row_stride] fp32: factors of the rows' scores
    row_hashes: Any  # [B * H, 2, row_stride] int32: low and high half of dropout.row_keys
    features: Any  # triton_features.Features
    copy_stride: int
    key_stride: int
    row_stride: int  # of lse and delta as well


@dataclass(frozen=True)
class Problem(Call):
    """A call whose tensors are laid out as the kernels want them, outside of autograd.

    The head dim is a multiple of 16 and the rows of q, k and v are aligned. Key biases are
    [B, H, padded Lk] fp32; what belongs to queries is [.., padded Lq]: first keys int32, the sink
    fp32, in base 2 and relative to `own`; the row scale fp32. Features are as given: each pass lays
    them out anew (triton_features).
    """

    own: Tensor | None = None  # [B, H, padded Lq] fp32, finite: subtracted from key biases
    visible: Tensor | None = None  # [H] int32
    row_hashes: Tensor | None = None  # [B, H, 2, padded Lq] int32: of the dropout
    arch: int = 80  # compute capability, times ten
    shared_memory: int = SHARED_MEMORY[80]  # bytes that a program may take

    @property
    def head_dim(self) -> int:
        return int(self.q.shape[-1])

    @property
    def block_d(self) -> int:
        return max(32, next_power_of_2(self.head_dim))

    @property
    def padded_rows(self) -> int:
        return padded(self.q_len)


def padded(length: int) -> int:
    return cdiv(length, ROW_MULTIPLE) * ROW_MULTIPLE


def _padded(x: Tensor, fill: float = 0.0) -> Tensor:
    return F.pad(x, (0, padded(x.shape[-1]) - x.shape[-1]), value=fill).contiguous()


def build_problem(call: Call, visible: Tensor | None) -> Problem:
    """Lay out a call; q, k and v are not copied if they already fit.

    `visible` (int32 [H]): keys at distance visible[h] or more change nothing beyond rounding, and
    tiles wholly beyond it are skipped.
    """
    features = ("query_features", "distance_features")
    call = call.in_fp32(besides=("q", "k", "v", "bias", "weight", *features))
    q, k, v = (aligned(x) for x in (call.q, call.k, call.v))
    if visible is None:  # one more load in the kernels is cheaper than kernels of two kinds
        visible = torch.full((q.shape[1],), call.reach, dtype=torch.int32, device=q.device)
    visible = visible.to(device=q.device, dtype=torch.int32).contiguous()
    first_key = None
    if call.first_key is not None:
        # no band beyond the largest distance that any query sees has an element
        own_key = torch.arange(call.offset, call.k_len, dtype=torch.int32, device=q.device)
        first_key = call.first_key.to(torch.int32)
        visible = visible.minimum((own_key - first_key).amax() + 1)
        first_key = _padded(first_key, fill=2**31 - 1)
    key_bias = own = sink = None
    if call.key_bias is not None:
        own = _padded(key_origin(call.key_bias, call.q_len).expand(q.shape[:3]))
        # bands have tiles that stick out at the end by a tile's rows and columns
        key_bias = _padded(F.pad(call.key_bias, (0, 2 * ROW_MULTIPLE)).expand(*q.shape[:2], -1))
    if (rows := sink_rows(call)) is not None:
        sink = _padded((rows * LOG2E).clamp(min=NO_SCORE), fill=NO_SCORE)
    row_scale = call.row_scale
    if row_scale is not None:
        row_scale = _padded(row_scale.expand(q.shape[:3]), fill=1.0)
    operands = (
        *(q, k, v, call.bias, call.weight, key_bias, first_key, sink),
        *(call.query_features, call.distance_features, row_scale),
    )
    arch = architecture(q.device)
    return Problem(
        *operands,
        window=call.window,
        scale=call.scale,
        dropout=call.dropout,
        own=own,
        visible=visible,
        row_hashes=_row_hashes(call) if call.dropout > 0.0 else None,
        arch=arch,
        shared_memory=shared_memory(q.device, arch),
    )


def _row_hashes(call: Call) -> Tensor:
    rows = row_keys(call)
    return _padded(torch.stack([rows.to(torch.int32), (rows >> 32).to(torch.int32)], 2))


def architecture(device: torch.device) -> int:
    """80 for an A100, 90 for an H100; 80 where there is no GPU."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def shared_memory(device: torch.device, arch: int) -> int:
    """Bytes that a program may take on this GPU; where there is none, on the GPUs of `arch`."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return SHARED_MEMORY[arch]
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def aligned(x: Tensor) -> Tensor:
    """x itself if the kernels can read its rows in whole vectors, else a contiguous copy."""
    steps = [x.stride(i) for i in range(3) if x.shape[i] > 1]
    good = x.stride(3) == 1 and all(step % ALIGNMENT == 0 for step in steps)
    # the kernels hold the offsets inside one tile in 32 bits
    small = all(step < 2**31 // 256 for step in steps[-1:])
    return (
        x
        if good and small and x.data_ptr() % ALIGNMENT == 0
        else x.clone(memory_format=torch.contiguous_format)
    )


def rows_of(x: Tensor) -> Rows:
    """With strides of 0 for an axis of one, which broadcasts and hinders nothing."""
    return Rows(x, *(x.stride(i) if x.shape[i] > 1 else 0 for i in range(3)))


# Tables over distance.


@jit()
def row_offsets(start, copy_stride):
    """Where entry `start[i]` of a table is, in the copy in which its address is aligned."""
    return (start & 3) * copy_stride + (start >> 2) * 4


@jit(do_not_specialize=["used", "start", "factor"])
def table_copies_kernel(
    table_ptr,
    out_ptr,  # [heads, 4, copy_stride]
    table_stride, copy_stride, used, start, factor,
    REVERSED: tl.constexpr, FILL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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


def table_layout(k_length: int, reverse: bool) -> tuple[int, int]:
    """(the entry of copy 0 that is distance 0, copy_stride) for keys of this length."""
    length = cdiv(k_length, 16) * 16
    return (length + PAD if reverse else PAD), length + 2 * PAD


def _table_copies(
    table: Tensor, problem: Problem, reverse: bool, fill: float, factor: float
) -> Launch:
    """The launch that fills the copies (its second argument) of `table * factor`."""
    start, stride = table_layout(problem.k_len, reverse)
    table = table if table.stride(1) == 1 else table.contiguous()
    heads = table.shape[0]
    copies = torch.empty(heads, COPIES, stride, dtype=torch.float32, device=table.device)
    arguments = (table, copies, table.stride(0), stride, problem.reach, start, factor)
    options = {"REVERSED": reverse, "FILL": fill, "BLOCK": _BLOCK, "num_warps": 4}
    options["enable_fp_fusion"] = True
    return Launch(table_copies_kernel, (cdiv(stride, _BLOCK), COPIES, heads), arguments, options)


def terms_of(problem: Problem, reverse: bool) -> tuple[list[Launch], Terms]:
    """The terms with their tables one way round, and the launches that make the copies."""
    launches, copies = [], {}
    for name, fill, factor in (("bias", NO_SCORE, LOG2E), ("weight", 0.0, problem.scale * LOG2E)):
        if (table := getattr(problem, name)) is not None:
            launches.append(_table_copies(table, problem, reverse, fill, factor))
            copies[name] = launches[-1].arguments[1]
    terms = Terms(
        copies.get("bias"), copies.get("weight"),
        problem.key_bias, problem.own, problem.first_key, problem.visible, problem.row_scale,
        problem.row_hashes,
        features=None,
        copy_stride=table_layout(problem.k_len, reverse)[1],
        key_stride=0 if problem.key_bias is None else problem.key_bias.shape[2],
        row_stride=problem.padded_rows,
    )  # fmt: skip
    return launches, terms
