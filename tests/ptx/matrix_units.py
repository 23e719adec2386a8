"""The tensor cores: mma.sync of a warp, wgmma of a warpgroup. Sums in float64, rounded once."""

from __future__ import annotations

import numpy as np

from tests.ptx.arithmetic import Array, bf16_value, f2, f4, f8, halves, tf32_value, u4
from tests.ptx.findings import PtxError
from tests.ptx.gang import WARPGROUP
from tests.ptx.shared_memory import SharedMemory

# How fragments lie in registers (PTX manual, "Matrix Fragments"): lane = 4 * row + column pair.
# A register of A is (half of the columns, half of the rows); [2, 2, warps, 8 rows, 4 columns, ...].


def _rows_of(registers: list[Array], kind: str, groups: int, rows: int, depth: int) -> Array:
    """A from registers, [groups, rows, depth]."""
    bits, count = np.array(registers), len(registers)
    if kind == "tf32":
        x = tf32_value(bits).reshape(count // 2, 2, -1, 8, 4).transpose(2, 1, 3, 0, 4)
    else:
        x = halves(bits, kind).reshape(count // 2, 2, -1, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5)
    return x.reshape(groups, rows, depth)


def _columns_of(registers: list[Array], kind: str, warps: int, depth: int) -> Array:
    """B from registers, [warps, depth, 8]."""
    bits, count = np.array(registers), len(registers)
    if kind == "tf32":
        x = tf32_value(bits).reshape(count, warps, 8, 4).transpose(1, 0, 3, 2)
    else:
        x = halves(bits, kind).reshape(count, warps, 8, 4, 2).transpose(1, 0, 3, 4, 2)
    return x.reshape(warps, depth, 8)


def mma(kind: str, depth: int, a: list[Array], b: list[Array], c: list[Array]) -> list[Array]:
    """mma.sync.m16n8k{depth}: the four registers of D."""
    warps = len(c[0]) // 32
    A = _rows_of(a, kind, warps, 16, depth).astype(f8)
    B = _columns_of(b, kind, warps, depth).astype(f8)
    D = np.matmul(A, B).reshape(warps, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3)
    D = (D + np.array(c).view(f4).reshape(2, 2, warps, 8, 4)).astype(f4)
    return [np.ascontiguousarray(D[i // 2, i % 2]).reshape(-1).view(u4) for i in range(4)]


class WarpGroups:
    """wgmma of sm_90: operands in shared memory, named by descriptors, read until waited for."""

    PROXY = 30  # the tensor core's reads are marked as those of a warp that no CTA has

    def __init__(self, shared: SharedMemory) -> None:
        self.shared, self.gang = shared, shared.gang
        self.fenced = 0  # writes up to this time have been shown to the tensor core
        self.open_reads: list[Array] = []
        self.read_groups: list[list[Array]] = []

    def fence(self) -> None:
        self.fenced = self.shared.time

    def commit(self) -> None:
        self.read_groups.append(self.open_reads)
        self.open_reads = []

    def wait(self, groups: int) -> None:
        while len(self.read_groups) > groups:
            for cells in self.read_groups.pop(0):
                np.add.at(self.shared.reads_under_way, cells, -1)

    def multiply(
        self,
        kind: str,
        columns: int,
        depth: int,
        old: list[Array] | None,
        a: list[Array] | Array,
        b: Array,
        keeps_old: bool | Array,
        transposed: tuple[int, int],
        line: int,
    ) -> list[Array]:
        """wgmma.mma_async.m64n{columns}k{depth}: D = A B (+ D)."""
        groups = self.gang.threads // WARPGROUP
        if isinstance(a, list):
            A = _rows_of(a, kind, groups, 64, depth)
        else:
            A = self._matrix(a, 64, depth, kind, transposed[0], line)
        B = self._matrix(b, columns, depth, kind, transposed[1], line)
        D = np.matmul(A.astype(f8), B.astype(f8).transpose(0, 2, 1))
        D = D.reshape(groups, 4, 2, 8, columns // 8, 4, 2).transpose(4, 2, 6, 0, 1, 3, 5)
        D = np.ascontiguousarray(D).reshape(columns // 2, self.gang.threads)
        if keeps_old is not False:
            before = np.array(old).view(f4)
            D = D + (before if keeps_old is True else np.where(keeps_old, before, f4(0)))
        return list(D.astype(f4).view(u4))

    def _matrix(
        self, descriptors: Array, rows: int, depth: int, kind: str, transposed: int, line: int
    ) -> Array:
        """The matrix [groups, rows, depth] that the descriptors tell of."""
        each = descriptors.reshape(-1, WARPGROUP)
        if (each != each[:, :1]).any():
            self.gang.complain("descriptor is not uniform in its warpgroup", line)
        width = 4 if kind == "tf32" else 2
        slots = self.gang.slot.reshape(-1, WARPGROUP)[:, 0].tolist()
        places = []
        for descriptor, slot in zip(each[:, 0].tolist(), slots, strict=True):
            at = _places(descriptor, rows, depth, width, bool(transposed))
            if (at + width > self.shared.size).any():
                detail = f"{int(at.max())} of {self.shared.size}"
                self.gang.complain("out of bounds shared wgmma", line, detail)
                at = np.minimum(at, self.shared.size - width)
            places.append(at + slot)
        at = np.stack(places)
        self._note_read(at.reshape(len(places), -1) // self.shared.granule, line)
        bits = self.shared.view[width][at // width]
        if kind == "tf32":
            return tf32_value(bits)
        return bf16_value(bits) if kind == "bf16" else bits.view(f2).astype(f4)

    def _note_read(self, cells: Array, line: int) -> None:
        if (self.shared.write_time[cells] > self.fenced).any():
            self.gang.complain("wgmma reads what was written since the last proxy fence", line)
        self.shared.mark_read(cells, np.full(len(cells), self.PROXY), line)
        np.add.at(self.shared.reads_under_way, cells.ravel(), 1)
        self.open_reads.append(cells.ravel())


def _places(descriptor: int, rows: int, depth: int, width: int, transposed: bool) -> Array:
    """Byte offsets [rows, depth] in a CTA's shared memory, swizzled."""
    start = (descriptor & 0x3FFF) << 4
    leading, stride = ((descriptor >> 16) & 0x3FFF) << 4, ((descriptor >> 32) & 0x3FFF) << 4
    swizzle = descriptor >> 62
    if (descriptor >> 49) & 7:
        raise PtxError("descriptor with a base offset")
    if swizzle == 0:
        raise PtxError("descriptor without swizzle")
    pitch = {1: 128, 2: 64, 3: 32}[swizzle]
    r, c = np.arange(rows)[:, None], np.arange(depth)[None, :]
    if transposed:
        wide = pitch // width
        at = start + (r // wide) * leading + (r % wide) * width
        at = at + (c % 8) * pitch + (c // 8) * stride
    else:
        at = start + (r // 8) * stride + (r % 8) * pitch + c * width
    return at ^ (((at >> 7) & (pitch // 16 - 1)) << 4)
