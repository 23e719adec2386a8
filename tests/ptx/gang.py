"""CTAs that run side by side, and who each of their threads is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.ptx.arithmetic import i4, i8, u4
from tests.ptx.findings import Report

WARP = 32
WARPGROUP = 128


@dataclass(frozen=True)
class Block:
    """What all CTAs of a launch have in common."""

    threads: int
    shared_bytes: int
    granule: int  # bytes of shared memory that are watched as one
    report: Report
    source_of: Callable[[int], str]  # line of PTX -> line of Triton


class Gang:
    """One element per thread, the threads of one CTA after those of another."""

    def __init__(
        self, block: Block, places: Sequence[Sequence[int]], numbers: Sequence[int]
    ) -> None:
        """`places` are the CTAs' coordinates in the grid, `numbers` their order in it."""
        self.block, count = block, len(places)
        self.threads = block.threads * count
        self.warps = self.threads // WARP
        self.tid = np.tile(np.arange(block.threads, dtype=u4), count)
        self.lane = self.tid & u4(WARP - 1)
        self.warp = (self.tid >> u4(5)).astype(i8)  # in its CTA
        self.warp_in_gang = np.arange(self.threads) >> 5
        self.all = np.ones(self.threads, bool)
        # each CTA has its stretch of one array of shared memory
        self.slot_bytes = -(-max(block.shared_bytes, 16) // 128) * 128
        self.slot = np.repeat(np.arange(count, dtype=i8), block.threads) * self.slot_bytes
        self.count = count
        self.cta = np.repeat(np.asarray(numbers, i4), block.threads)
        axes = zip(*places, strict=True)
        self.ctaid = [np.repeat(np.asarray(axis, u4), block.threads) for axis in axes]

    def complain(self, kind: str, line: int, detail: str = "") -> None:
        ctas = sorted(set(self.cta.tolist()))[:4]
        source = self.block.source_of(line)
        self.block.report.add(kind, line, source, f"ctas {ctas} {detail}")
