"""What translated code runs on: a gang's threads, memories and matrix units."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.ptx.arithmetic import Array, i8
from tests.ptx.gang import WARP, Block, Gang
from tests.ptx.global_memory import GlobalAccess, GlobalMemory
from tests.ptx.matrix_units import WarpGroups
from tests.ptx.shared_memory import SharedMemory


class Machine:
    """The state of the CTAs that run side by side."""

    def __init__(
        self,
        block: Block,
        memory: GlobalMemory,
        places: Sequence[Sequence[int]],
        numbers: Sequence[int],
        tracking: bool,
    ) -> None:
        self.gang = Gang(block, places, numbers)
        self.globals = GlobalAccess(self.gang, memory)
        self.shared = SharedMemory(self.gang, self.globals, tracking)
        self.warpgroups = WarpGroups(self.shared)

    def shuffle(self, mode: str, value: Array, b: Array, c: Array) -> tuple[Array, Array]:
        """shfl.sync with all lanes: the value of another lane, and whether there was one."""
        lane = self.gang.lane.astype(i8)
        b = np.broadcast_to(b, lane.shape).astype(i8) & (WARP - 1)
        c = np.broadcast_to(c, lane.shape).astype(i8)
        clamp, segment = c & (WARP - 1), (c >> 8) & (WARP - 1)
        limit = (lane & segment) | (clamp & ~segment)
        if mode == "up":
            source = lane - b
            found = source >= limit
        else:
            if mode == "down":
                source = lane + b
            elif mode == "bfly":
                source = lane ^ b
            else:
                source = (lane & segment) | (b & ~segment)
            found = source <= limit
        source = np.where(found, source, lane)
        return value[self.gang.warp_in_gang * WARP + source], found
