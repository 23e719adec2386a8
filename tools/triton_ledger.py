"""The ledger of the Triton attention kernels: what each inner loop costs, and what that allows.

Counts come from machine code that is compiled when the ledger is asked for. The bound of a kernel
is the share of the tensor cores' peak that its inner loop can reach at best:

    bound = FLOP of the tile's products / (FLOP per clock * clocks of the busiest unit)

FLOP per clock and multiprocessor: 2048 (A100), 1024 (8.6, 8.9), 4096 (H100). For W warps, on four
quarters:

    tensor   FLOP of a warp's HMMA or HGMMA * W / FLOP per clock (A100: HMMA * 8 * W/4)
    shared   bytes per lane / 4 * W  (LDSM, LDS, STS, cp.async), LDG and SHFL 1 * W, and what HGMMA
             itself reads: 32 bytes for each of its columns, and of its 64 rows unless they are in
             registers, / 128
    exp      MUFU * 8 * W/4
    fma,alu  instructions * 2 * W/4; fp32 instructions half of that where there are 128 lanes
    issue    all instructions * W/4

Not modelled: spills (their accesses are the column "local"; "with spills" is the bound if each of
them took a slot of shared memory), bank conflicts, latency, tiles that are half masked, and what
lies outside the loop. Real speed is lower. The whole backward does five useful products; its bound
is those over the clocks of all its kernels.

With features the loop is the one over keys (queries) within their reach. "Within reach" adds, for
each tile, its share of the loops that write the strips and, in dQ, of the one that sums their
gradients: for features of 1,024 distances, in blocks of 128 queries.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from tools import compile_triton, sass
from tools.benchmarks.timing import render_table
from tools.compile_triton import Configuration, Report

# 8.6 and 8.9 as the A10, A40, L4 and L40S have it; GeForce cards have half of it
FLOP_PER_CLOCK = {80: 2048, 86: 1024, 89: 1024, 90: 4096}
FP32_LANES = {80: 64, 86: 128, 89: 128, 90: 128}
# products of a tile per kernel
PRODUCTS = {"forward": 2, "dkdv": 4, "dq": 3, "band": 2, "steep band": 2}
USEFUL_BACKWARD = 5
# bf16 by arch and head dimension: forward with a learned bias, backward without and with the
# gradient of the table
TARGETS = {
    (80, 64): (0.75, 0.58, 0.46),
    (80, 128): (0.80, 0.50, 0.40),
    (90, 64): (0.50, 0.45, 0.36),
    (90, 128): (0.69, 0.50, 0.38),
}
# the same with features alone, within their reach: forward, and backward with their gradients
REACH_TARGETS = {(80, 64): (0.54, 0.34), (80, 128): (0.68, 0.39)}
# and bytes of stack: dQ at D 128 holds two tiles of rows beside its sum
REACH_STACK, REACH_STACK_DQ_128 = 300, 448
# distances of the features; rows and columns of a strip's product, columns of its gradients'
_REACH, _STRIP, _GRADIENTS = 1024, 128, 32
MAX_BARRIERS = 2
# per multiprocessor: registers, shared memory in bytes (1 KB of it is taken from each block)
_REGISTERS = 65536
_SHARED = {80: 164 * 1024, 86: 100 * 1024, 89: 100 * 1024, 90: 228 * 1024}
_WARPS = {80: 64, 86: 48, 89: 48, 90: 64}


@dataclass(frozen=True)
class Entry:
    """One kernel of the ledger."""

    report: Report
    loop: sass.Loop
    strips: tuple[sass.Loop, ...] = ()  # that write strips; in dQ, last, that sums gradients

    @property
    def arch(self) -> int:
        return self.report.configuration.arch

    @property
    def kernel(self) -> str:
        return self.report.kernel

    @property
    def warps(self) -> int:
        return int(self.report.options["num_warps"])

    @property
    def flop(self) -> int:
        """Of the products of one tile."""
        c = self.report.options["C"]
        tile = c.BLOCK_M.value * c.BLOCK_N.value * c.BLOCK_D.value
        return int(2 * tile * PRODUCTS[self.kernel])

    @property
    def ideal(self) -> float:
        """Tensor-core instructions per warp, if no product were computed twice."""
        return self.loop.tensor_core * self.flop / (self.loop.tensor_flop * self.warps)

    @cached_property
    def clocks(self) -> dict[str, float]:
        return self._clocks(self.loop)

    def _clocks(self, loop: sass.Loop) -> dict[str, float]:
        return loop.clocks(self.warps, FLOP_PER_CLOCK[self.arch], FP32_LANES[self.arch])

    @property
    def busiest(self) -> str:
        return max(self.clocks, key=lambda unit: self.clocks[unit])

    @property
    def bound(self) -> float:
        return self.flop / FLOP_PER_CLOCK[self.arch] / self.clocks[self.busiest]

    @property
    def within_reach(self) -> float:
        """The bound with the tile's share of what its strips cost."""
        c = self.report.options["C"]
        rows, keys = c.BLOCK_M.value, c.BLOCK_N.value
        busy = [max(self._clocks(loop).values()) for loop in self.strips]
        writing = busy[:-1] if self.kernel == "dq" else busy
        # columns that are written for each key that is walked: a block of queries needs its own
        # length more; a block of keys writes for as many keys again
        columns = 2.0 if self.kernel == "dkdv" else (_REACH + 2 * _STRIP) / (_REACH + _STRIP)
        clocks = self.clocks[self.busiest] + sum(writing) * columns * rows * keys / _STRIP**2
        if self.kernel == "dq":
            clocks += busy[-1] * columns * keys / _GRADIENTS
        return self.flop / FLOP_PER_CLOCK[self.arch] / clocks

    @property
    def bound_with_spills(self) -> float:
        """The bound, if spilled registers pass through shared memory's data path."""
        shared = self.clocks["shared"] + self.loop.local_accesses * self.warps
        return self.flop / FLOP_PER_CLOCK[self.arch] / max(shared, self.clocks[self.busiest])

    @property
    def blocks(self) -> int:
        """Programs that fit on a multiprocessor at once."""
        # registers are given to warps in steps of 256
        per_warp = -(-self.report.registers * 32 // 256) * 256
        by_registers = _REGISTERS // (per_warp * self.warps)
        by_shared = _SHARED[self.arch] // (self.report.shared_bytes + 1024)
        return min(by_registers, by_shared, _WARPS[self.arch] // self.warps)

    def misses(self) -> list[str]:
        """What every inner loop must keep, in words."""
        loop, found = self.loop, []
        if loop.tensor_core > self.ideal:
            found.append(f"{loop.tensor_core} tensor-core instructions, ideal {self.ideal:.0f}")
        if loop.barriers > MAX_BARRIERS:
            found.append(f"{loop.barriers} barriers, at most {MAX_BARRIERS}")
        if loop.global_accesses:
            found.append(f"{loop.global_accesses} global accesses that are not cp.async")
        limit = self.report.configuration.stack_limit
        if self.report.stack_bytes > limit:
            found.append(f"{self.report.stack_bytes} B of stack, at most {limit}")
        return found

    def row(self, without_bias: Entry | None = None) -> tuple[str, ...]:
        c, loop = self.report.configuration, self.loop
        return (
            f"sm_{c.arch}", self.kernel, str(c.head_dim), c.dtype, c.tables, c.extras,
            self.report.tile, f"{self.warps}/{self.report.options['num_stages']}",
            str(self.report.registers), str(self.report.stack_bytes),
            f"{self.report.shared_bytes / 1024:.0f}", str(self.blocks),
            f"{loop.tensor_core} ({self.ideal:.0f})", str(loop.barriers),
            str(loop.shared_bytes), str(loop.exponentials), str(loop.global_accesses),
            str(loop.local_accesses), f"{self.bound:.0%} {self.busiest}",
            f"{self.bound_with_spills:.0%}",
            "-" if without_bias is None else f"{without_bias.bound:.0%} {without_bias.busiest}",
        )  # fmt: skip


HEADER = (
    "arch", "kernel", "D", "dtype", "tables", "extras", "tile", "warps/stages", "registers",
    "stack B", "shared KB", "CTA/SM", "MMA (ideal)", "barriers", "shared B/lane", "exp",
    "global", "local", "bound", "with spills", "no tables",
)  # fmt: skip


def entries_of(configuration: Configuration) -> dict[str, Entry]:
    """The kernels of a configuration that have an inner loop of products."""
    entries = {}
    for made in compile_triton.reports_of(configuration):
        if made.kernel not in PRODUCTS:
            continue
        loops = sass.inner_loops(sass.disassemble(made.cubin))
        if not loops:
            raise RuntimeError(f"no inner loop found in {made.kernel} of {configuration}")
        strips = tuple(loop for loop in loops if not loop.exponentials)
        longest = max(loops, key=lambda loop: (loop.exponentials > 0, loop.instructions))
        entries[made.kernel] = Entry(made, longest, strips)
    return entries


def whole_backward(entries: dict[str, Entry], table_gradient: bool) -> float:
    """Bound of dK/dV, dQ and perhaps the bands together; steep bands are the exception."""
    kernels = ["dkdv", "dq", *(["band"] if table_gradient else [])]
    return _together({name: entries[name].bound for name in kernels})


def backward_within_reach(entries: dict[str, Entry]) -> float:
    """Bound of dK/dV and dQ with the features' gradients, and with that of a table."""
    return _together({name: entries[name].within_reach for name in ("dkdv", "dq")})


def _together(bounds: dict[str, float]) -> float:
    # clocks for one unit of products: a kernel with `n` of them takes n / bound
    return USEFUL_BACKWARD / sum(PRODUCTS[name] / bound for name, bound in bounds.items())


def misses_of(configuration: Configuration, entries: dict[str, Entry]) -> list[str]:
    """The targets that a configuration misses, with the numbers: bf16 on sm_80 and sm_90."""
    if configuration.features:
        return _reach_misses(configuration, entries)
    targets = TARGETS.get((configuration.arch, configuration.head_dim))
    if configuration.dtype != "bf16" or targets is None:
        return []
    found = []
    if configuration.arch == 80:  # for which the loops were written
        found = [f"{name}: {miss}" for name, entry in entries.items() for miss in entry.misses()]
    if configuration.tables != "bias" or configuration.extras != "plain":
        return found
    reached = {
        "forward": (entries["forward"].bound, targets[0]),
        "backward without the table's gradient": (whole_backward(entries, False), targets[1]),
        "backward with it": (whole_backward(entries, True), targets[2]),
    }
    return found + _below(reached)


def _reach_misses(configuration: Configuration, entries: dict[str, Entry]) -> list[str]:
    targets = REACH_TARGETS.get((configuration.arch, configuration.head_dim))
    plain = (configuration.dtype, configuration.tables, configuration.extras)
    if targets is None or plain != ("bf16", "none", "features"):
        return []
    found = []
    for name, entry in entries.items():
        wide = name == "dq" and configuration.head_dim == 128
        limit = REACH_STACK_DQ_128 if wide else REACH_STACK
        if entry.report.stack_bytes > limit:
            found.append(f"{name}: {entry.report.stack_bytes} B of stack, at most {limit}")
    reached = {
        "forward within reach": (entries["forward"].within_reach, targets[0]),
        "backward within reach": (backward_within_reach(entries), targets[1]),
    }
    return found + _below(reached)


def _below(reached: dict[str, tuple[float, float]]) -> list[str]:
    return [
        f"{name}: bound {bound:.1%}, target {target:.0%}"
        for name, (bound, target) in reached.items()
        if bound < target
    ]


def report(configurations: Iterable[Configuration]) -> int:
    """Print the ledger; 1 if a target is missed."""
    rows: list[tuple[str, ...]] = [HEADER]
    lines, missed = [], 0
    for configuration in configurations:
        entries = entries_of(configuration)
        bare = entries_of(replace(configuration, tables="none"))
        rows += [entry.row(bare.get(name)) for name, entry in entries.items()]
        name = (
            f"sm_{configuration.arch} D{configuration.head_dim} {configuration.dtype}"
            f" {configuration.tables} {configuration.extras}"
        )
        line = f"{name}: forward {entries['forward'].bound:.1%}"
        line += f", whole backward {whole_backward(entries, False):.1%} without a table gradient"
        if configuration.features:
            reach = (entries["forward"].within_reach, backward_within_reach(entries))
            line += ", within the features' reach {:.1%} and {:.1%}".format(*reach)
        elif "band" in entries:
            line += f", {whole_backward(entries, True):.1%} with it"
        misses = misses_of(configuration, entries)
        missed += len(misses)
        lines += [line, *(f"  MISSED {miss}" for miss in misses)]
    print(render_table(rows))
    assert __doc__ is not None
    print("\n" + __doc__.split("\n\n", 1)[1])
    print("\n".join(lines))
    return 1 if missed else 0
