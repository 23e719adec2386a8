"""Global memory: the storages of a launch's tensors, and who may touch what in them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from tests.ptx.arithmetic import BITS, Array, i4, i8, u8
from tests.ptx.gang import Gang

NOBODY = -1


class Region:
    """The storage of one or more arguments. Owners are kept for every two bytes."""

    def __init__(self, base: int, size: int, buffer: Array) -> None:
        self.base, self.size, self.buffer = base, size, buffer
        padded = -(-size // 16) * 16
        self.allowed = np.zeros(padded, bool)  # bytes that belong to some argument
        self.names: list[str] = []
        self._views: dict[int, Array] = {}
        self.writer = np.full(padded // 2, NOBODY, i4)  # the CTA that wrote here
        self.reader = np.full(padded // 2, NOBODY, i4)
        self.allowed_pairs = np.zeros(0, bool)

    def allow(self, tensor: Tensor, name: str) -> None:
        self.names.append(name)
        width = tensor.element_size()
        strides = tuple(step * width for step in tensor.stride())
        bytes_ = self.allowed[tensor.data_ptr() - self.base :]
        for byte in range(width):
            view = np.lib.stride_tricks.as_strided(bytes_[byte:], tuple(tensor.shape), strides)
            view[...] = True
        self.allowed_pairs = self.allowed[: self.size // 2 * 2].reshape(-1, 2).all(1)

    def view(self, width: int) -> Array:
        if width not in self._views:
            whole = self.size // width * width
            self._views[width] = self.buffer[:whole].view(BITS[width])
        return self._views[width]

    def fits(self, offset: Array, total: int, cells: Array) -> Array:
        """Which accesses lie wholly in elements of arguments."""
        inside = offset + total <= self.size
        if total >= 2:
            last = len(self.allowed_pairs) - 1
            return inside & self.allowed_pairs[np.minimum(cells, last)].all(1)
        return inside & self.allowed[np.minimum(offset, len(self.allowed) - 1)]


class GlobalMemory:
    """All regions of a launch, by address."""

    def __init__(self, tensors: Sequence[tuple[Tensor, str]]) -> None:
        regions: dict[int, Region] = {}
        for tensor, name in tensors:
            storage = tensor.untyped_storage()
            base, size = storage.data_ptr(), storage.nbytes()
            if base not in regions:
                buffer = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(base))
                regions[base] = Region(base, size, buffer)
            regions[base].allow(tensor, name)
        self.regions = sorted(regions.values(), key=lambda region: region.base)
        self.bases = np.array([region.base for region in self.regions], dtype=u8)

    def locate(self, address: Array) -> Array:
        """The index of the region that an address lies in or behind; -1 for none."""
        return np.searchsorted(self.bases, address, side="right").astype(i8) - 1


# region, threads, byte offsets of the threads' accesses in it
Part = tuple[Region, Array, Array]


class GlobalAccess:
    """Loads and stores of a gang of CTAs, checked."""

    def __init__(self, gang: Gang, memory: GlobalMemory) -> None:
        self.gang, self.memory = gang, memory

    def load(
        self,
        address: Array,
        width: int,
        count: int,
        active: Array | None,
        old: list[Array],
        line: int,
    ) -> list[Array]:
        """`count` arrays of `width` bytes; `old` for threads that are not active."""
        out = [x.copy() for x in old]
        for region, threads, offset in self.find(address, width * count, active, line):
            at = offset // width
            for i in range(count):
                out[i][threads] = region.view(width)[at + i]
        return out

    def store(
        self, address: Array, width: int, values: list[Array], active: Array | None, line: int
    ) -> None:
        for region, threads, offset in self.find(address, width * len(values), active, line, True):
            view, at = region.view(width), offset // width
            for i, value in enumerate(values):
                view[at + i] = value[threads]
                if (view[at + i] != value[threads]).any():
                    self.gang.complain("threads disagree about a store", line, str(region.names))

    def find(
        self, address: Array, total: int, active: Array | None, line: int, write: bool = False
    ) -> list[Part]:
        """The legal part of an access of `total` bytes per thread; complains about the rest."""
        who = np.flatnonzero(self.gang.all if active is None else active)
        at = address[who]
        bad = (at % u8(total)) != 0
        if bad.any():
            detail = f"{total} bytes at {at[bad][0]:#x} thread {who[bad][0]}"
            self.gang.complain("misaligned global", line, detail)
            who, at = who[~bad], at[~bad]
        parts = []
        found = self.memory.locate(at)
        for index in np.unique(found):
            here = found == index
            if index < 0:
                self._out_of_bounds(line, write, f"{at[here][0]:#x}")
                continue
            region = self.memory.regions[index]
            offset = (at[here] - u8(region.base)).astype(i8)
            threads, offset, cells = self._inside(region, who[here], offset, total, line, write)
            if len(threads):
                self._note_owner(region, threads, cells, line, write)
                parts.append((region, threads, offset))
        return parts

    def _out_of_bounds(self, line: int, write: bool, detail: str) -> None:
        self.gang.complain("out of bounds " + ("store" if write else "load"), line, detail)

    def _inside(
        self, region: Region, threads: Array, offset: Array, total: int, line: int, write: bool
    ) -> tuple[Array, Array, Array]:
        cells = (offset // 2)[:, None] + np.arange(max(total // 2, 1))
        good = region.fits(offset, total, cells)
        if not good.all():
            bad = np.flatnonzero(~good)
            place = f"byte {offset[bad[0]]} of {region.size} in {region.names}"
            detail = f"{len(bad)} threads, e.g. thread {threads[bad[0]]} {place}"
            self._out_of_bounds(line, write, detail)
        return threads[good], offset[good], cells[good]

    def _note_owner(
        self, region: Region, threads: Array, cells: Array, line: int, write: bool
    ) -> None:
        """No CTA may depend on what another one does in the same launch."""
        own = self.gang.cta[threads][:, None] + np.zeros(cells.shape[1], i4)
        names = str(region.names)

        def of_another(owner: Array) -> bool:
            return bool(((owner != NOBODY) & (owner != own)).any())

        if not write:
            if of_another(region.writer[cells]):
                self.gang.complain("reads what another CTA wrote", line, names)
            region.reader[cells] = own
            return
        if of_another(region.writer[cells]):
            self.gang.complain("written by two CTAs", line, names)
        if of_another(region.reader[cells]):
            self.gang.complain("write after another CTA's read", line, names)
        region.writer[cells] = own
        if (region.writer[cells] != own).any():
            self.gang.complain("written by two CTAs", line, names)
