"""Shared memory of a gang of CTAs: its bytes, who touched them since the last barrier, cp.async.

Watched for every granule (`Block.granule` bytes, a "cell"): whether it was ever written, copies
under way into it, wgmma reads under way from it, and the last write and the reads by warp, each
with the epoch (the number of barriers so far) in which they happened.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.ptx.arithmetic import BITS, Array, i4, i8, u1, u2, u4
from tests.ptx.gang import WARP, Gang
from tests.ptx.global_memory import GlobalAccess, Part

_NEVER = -1
_GARBAGE = 0xCD


@dataclass(frozen=True)
class Copy:
    """One cp.async of all threads: where from, where to; it happens when it is waited for."""

    threads: Array
    at: Array
    cells: Array
    size: int
    sources: list[Part]


class SharedMemory:
    def __init__(self, gang: Gang, globals_: GlobalAccess, tracking: bool) -> None:
        """`tracking`: look for races between warps (the other checks are always made)."""
        self.gang, self.globals, self.tracking = gang, globals_, tracking
        self.size, self.granule = gang.block.shared_bytes, gang.block.granule
        data = np.full(gang.slot_bytes * gang.count, _GARBAGE, u1)
        self.view = {width: data.view(BITS[width]) for width in (1, 2, 4, 8)}
        cells = len(data) // self.granule
        self.written = np.zeros(cells, bool)
        self.copies_into = np.zeros(cells, i4)
        self.write_epoch = np.full(cells, _NEVER, i4)
        self.write_warp = np.full(cells, _NEVER, i4)
        self.read_epoch = np.full(cells, _NEVER, i4)
        self.read_warps = np.zeros(cells, i4)  # a bit per warp
        self.epoch = 0
        self.open_copies: list[Copy] = []
        self.groups: list[list[Copy]] = []
        # for wgmma: its reads under way, and when each cell was written
        self.reads_under_way = np.zeros(cells, i4)
        self.write_time = np.full(cells, _NEVER, i8)
        self.time = 0

    def barrier(self) -> None:
        self.epoch += 1

    def end(self, line: int) -> None:
        if any(self.groups) or self.open_copies:
            self.gang.complain("ends with cp.async under way", line)

    # Loads and stores

    def load(
        self,
        address: Array,
        width: int,
        count: int,
        active: Array | None,
        old: list[Array],
        line: int,
    ) -> list[Array]:
        out = [x.copy() for x in old]
        who, at, cells = self._find(address, width * count, active, line, "load")
        if len(who):
            self.mark_read(cells, self.gang.warp[who], line)
            for i in range(count):
                out[i][who] = self.view[width][at // width + i]
        return out

    def store(
        self, address: Array, width: int, values: list[Array], active: Array | None, line: int
    ) -> None:
        who, at, cells = self._find(address, width * len(values), active, line, "store")
        if not len(who):
            return
        self._mark_write(cells, self.gang.warp[who], line)
        view, place = self.view[width], at // width
        for i, value in enumerate(values):
            view[place + i] = value[who]
            if (view[place + i] != value[who]).any():
                self.gang.complain("threads disagree about a shared store", line)

    def load_matrices(self, address: Array, count: int, transposed: bool, line: int) -> list[Array]:
        """ldmatrix: 8 x 8 halves each; lane 8 i + j has the address of row j of matrix i."""
        rows, warps, slot = self._matrix_rows(address, count)
        everyone = np.ones(len(rows), bool)
        who, at, cells = self._find(rows, 16, everyone, line, "ldmatrix", slot)
        self.mark_read(cells, warps[who], line)
        words = np.zeros((len(rows), 4), u4)
        words[who] = self.view[4][(at // 4)[:, None] + np.arange(4)]
        matrices = words.reshape(self.gang.warps, count, 8, 4)
        if transposed:
            matrices = _transposed(matrices)
        return [np.ascontiguousarray(matrices[:, i]).reshape(-1) for i in range(count)]

    def store_matrices(
        self, address: Array, values: list[Array], transposed: bool, line: int
    ) -> None:
        """stmatrix."""
        rows, warps, slot = self._matrix_rows(address, len(values))
        matrices = np.stack([value.reshape(self.gang.warps, 8, 4) for value in values], 1)
        if transposed:
            matrices = _transposed(matrices)
        everyone = np.ones(len(rows), bool)
        who, at, cells = self._find(rows, 16, everyone, line, "stmatrix", slot)
        self._mark_write(cells, warps[who], line)
        self.view[4][(at // 4)[:, None] + np.arange(4)] = matrices.reshape(-1, 4)[who]

    def _matrix_rows(self, address: Array, count: int) -> tuple[Array, Array, Array]:
        """Of the lanes that name a row: the address, the warp, the CTA's slot."""
        lanes = (self.gang.warps, WARP)
        each = (address, self.gang.warp, self.gang.slot)
        rows, warps, slot = (x.reshape(lanes)[:, : 8 * count].reshape(-1) for x in each)
        return rows, warps, slot

    def _find(
        self,
        address: Array,
        total: int,
        active: Array | None,
        line: int,
        what: str,
        slot: Array | None = None,
    ) -> tuple[Array, Array, Array]:
        """Threads, byte offsets and cells [threads, ...] of the legal accesses."""
        slot = self.gang.slot if slot is None else slot
        who = np.flatnonzero(self.gang.all if active is None else active)
        at = address[who].astype(i8)
        crooked = at % total != 0
        bad = crooked | (at + total > self.size)
        if bad.any():
            kind = "misaligned" if crooked.any() else "out of bounds"
            detail = f"{at[bad][0]} +{total} of {self.size}"
            self.gang.complain(f"{kind} shared {what}", line, detail)
            who, at = who[~bad], at[~bad]
        at = at + slot[who]
        cells = at[:, None] // self.granule + np.arange(max(total // self.granule, 1))
        return who, at, cells

    # Who touched what

    def mark_read(self, cells: Array, warps: Array, line: int) -> None:
        if self.copies_into[cells].any():
            self.gang.complain("reads shared memory that cp.async still fills", line)
        if not self.written[cells].all():
            byte = int(cells[~self.written[cells]][0]) * self.granule
            self.gang.complain("reads shared memory never written", line, f"byte {byte}")
        if not self.tracking:
            return
        warp = warps[:, None] + np.zeros(cells.shape[1], i8)
        fresh = self.write_epoch[cells] == self.epoch
        if (fresh & (self.write_warp[cells] != warp)).any():
            self.gang.complain("race: reads what another warp wrote without a barrier", line)
        old = self.read_epoch[cells] != self.epoch
        self.read_warps[cells[old]] = 0
        self.read_epoch[cells] = self.epoch
        np.bitwise_or.at(self.read_warps, cells.ravel(), (1 << warp.ravel()).astype(i4))

    def _mark_write(self, cells: Array, warps: Array, line: int, filled: bool = True) -> None:
        """`filled`: the bytes are there now, not when a copy has been waited for."""
        if self.copies_into[cells].any():
            self.gang.complain("writes shared memory that cp.async still fills", line)
        if self.reads_under_way[cells].any():
            self.gang.complain("overwrites shared memory that wgmma still reads", line)
        self.time += 1
        self.write_time[cells] = self.time
        if filled:
            self.written[cells] = True
        if not self.tracking:
            return
        warp = warps[:, None] + np.zeros(cells.shape[1], i8)
        same = self.write_epoch[cells] == self.epoch
        if (same & (self.write_warp[cells] != warp)).any():
            self.gang.complain("race: two warps write without a barrier", line)
        read = self.read_epoch[cells] == self.epoch
        if (read & ((self.read_warps[cells] & ~(1 << warp).astype(i4)) != 0)).any():
            what = "race: overwrites what another warp reads without a barrier"
            self.gang.complain(what, line)
        if filled:
            self.write_epoch[cells] = self.epoch
            self.write_warp[cells] = warp

    # cp.async

    def copy_async(
        self,
        target: Array,
        source: Array,
        size: int,
        source_size: Array | None,
        active: Array | None,
        line: int,
    ) -> None:
        """A copy of `size` bytes; of zeros where `source_size` is 0."""
        gang = self.gang
        active = gang.all if active is None else active
        count = np.full(gang.threads, size, u4) if source_size is None else source_size
        if ((count != 0) & (count != size))[active].any():
            gang.complain("cp.async copies a part", line)
        who, at, cells = self._find(target, size, active, line, "cp.async")
        if not len(who):
            return
        self._mark_write(cells, gang.warp[who], line, filled=False)
        self.copies_into[cells] += 1
        reads = np.zeros(gang.threads, bool)
        reads[who] = count[who] != 0
        sources = self.globals.find(source, size, reads, line)
        self.open_copies.append(Copy(who, at, cells, size, sources))

    def commit(self) -> None:
        self.groups.append(self.open_copies)
        self.open_copies = []

    def wait(self, groups: int) -> None:
        """Until at most so many groups are under way."""
        while len(self.groups) > groups:
            for copy in self.groups.pop(0):
                self._finish(copy)

    def _finish(self, copy: Copy) -> None:
        words = np.arange(copy.size // 4)
        data = np.zeros((self.gang.threads, len(words)), u4)
        for region, threads, offset in copy.sources:
            data[threads] = region.view(4)[(offset // 4)[:, None] + words]
        self.view[4][(copy.at // 4)[:, None] + words] = data[copy.threads]
        cells = copy.cells
        self.copies_into[cells] -= 1
        self.time += 1
        self.write_time[cells] = self.time
        self.written[cells] = True
        if self.tracking:
            self.write_epoch[cells] = self.epoch
            warps = self.gang.warp[copy.threads][:, None]
            self.write_warp[cells] = np.broadcast_to(warps, cells.shape)


def _transposed(matrices: Array) -> Array:
    """Matrices [warps, count, 8, 4 words] of 8 x 8 halves."""
    shape = matrices.shape
    halves = np.ascontiguousarray(matrices).view(u2).reshape(*shape[:2], 8, 8)
    return np.ascontiguousarray(halves.transpose(0, 1, 3, 2)).view(u4).reshape(shape)
