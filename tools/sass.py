"""Machine code of a compiled kernel: disassemble it, find its inner loop, count what a pass costs.

The disassembler comes with the Triton wheel. `Loop.clocks` says how long each unit of a
multiprocessor is busy with one pass: the loop cannot be faster than its busiest unit.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)(.*)")
_LABEL = re.compile(r"^\s*(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_WIDTH = re.compile(r"\.(U8|S8|U16|S16|32|64|128)\b")
_HGMMA = re.compile(r"HGMMA\.64x(\d+)x16\b")
_ROWS_IN_REGISTERS = re.compile(r"\s*R\d+, R\d+, gdesc")
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "32": 4, "64": 8, "128": 16}
_FP32 = ("FFMA", "FADD", "FMUL", "HFMA2", "HADD2", "HMUL2")
_ALU_PIPE = (
    "FMNMX", "FSEL", "FSETP", "ISETP", "SEL", "LOP3", "IADD3", "SHF", "LEA", "PRMT", "PLOP3",
    "F2F", "F2FP", "MOV", "IMNMX", "VIMNMX", "FSET", "BFE", "IABS",
)  # fmt: skip


@dataclass(frozen=True)
class Loop:
    """Counts of one pass through an inner loop, for one warp."""

    counts: Counter[str]  # instructions by name up to the first dot
    widths: Counter[str]  # bytes per lane by kind: LDS, STS, LDGSTS, LDSM (matrices of 8 x 8)
    instructions: int
    tensor_flop: int  # of one warp; HMMA 16x8x16, or a quarter of HGMMA's 64xNx16
    tensor_bytes: int = 0  # that HGMMA itself reads from shared memory, a warp's quarter of them

    def count(self, *names: str) -> int:
        return sum(self.counts[name] for name in names)

    @property
    def tensor_core(self) -> int:
        return self.count("HMMA", "HGMMA")

    @property
    def barriers(self) -> int:
        return self.count("BAR")

    @property
    def global_accesses(self) -> int:
        """Loads and stores of global memory that hold a warp up: all but cp.async."""
        return self.count("LDG", "STG", "LD", "ST", "ATOM", "ATOMG", "RED")

    @property
    def local_accesses(self) -> int:
        return self.count("LDL", "STL")

    @property
    def exponentials(self) -> int:
        return self.count("MUFU")

    @property
    def shared_bytes(self) -> int:
        """Bytes that one lane moves to or from shared memory."""
        return sum(self.widths.values())

    def clocks(
        self, warps: int, flop_per_clock: int = 2048, fp32_lanes: int = 64
    ) -> dict[str, float]:
        """Clocks of one multiprocessor (four quarters) that each of its units is busy."""
        quarter = warps / 4
        # a lane's four bytes are a warp's 128: one clock; so is a global load's or shuffle's slot
        shared = self.shared_bytes / 4 + self.count("LDG", "STG", "SHFL") + self.tensor_bytes / 128
        # half of 128 fp32 lanes do not multiply integers
        integers = self.count("IMAD")
        fma = max((self.count(*_FP32) + integers) * 128 / fp32_lanes, integers * 2)
        return {
            "tensor": self.tensor_flop * warps / flop_per_clock,
            "shared": shared * warps,
            "exp": self.count("MUFU") * 8 * quarter,
            "fma": fma * quarter,
            "alu": self.count(*_ALU_PIPE) * 2 * quarter,
            "issue": self.instructions * quarter,
        }


def ask(tool: str, option: str, cubin: bytes) -> str:
    """What a tool of the Triton wheel says about a cubin."""
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([str(program), option, file.name], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{program} failed: {done.stderr.strip()}")
    return done.stdout


def disassemble(cubin: bytes) -> str:
    return ask("nvdisasm", "-c", cubin)


def _parse(sass: str) -> tuple[list[tuple[str, str]], dict[str, int]]:
    code: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if (label := _LABEL.match(line)) is not None:
            labels[label[1]] = len(code)
        elif (found := _INSTRUCTION.search(line)) is not None:
            code.append((found[1], found[2]))
    return code, labels


def inner_loops(sass: str) -> list[Loop]:
    """All innermost loops that multiply matrices, in the order of the code."""
    code, labels = _parse(sass)
    loops = []
    for end, (name, rest) in enumerate(code):
        target = _TARGET.search(rest) if name.startswith("BRA") else None
        start = labels.get(target[1], end + 1) if target is not None else end + 1
        if start <= end and any(op.startswith(("HMMA", "HGMMA")) for op, _ in code[start:end]):
            loops.append((start, end))
    return [
        _count(code[loop[0] : loop[1] + 1])
        for loop in loops
        if not any(loop != o and loop[0] <= o[0] and o[1] <= loop[1] for o in loops)
    ]


def _count(code: list[tuple[str, str]]) -> Loop:
    counts: Counter[str] = Counter()
    widths: Counter[str] = Counter()
    tensor_flop = tensor_bytes = 0
    for name, operands in code:
        kind = name.split(".")[0]
        if (shape := _HGMMA.match(name)) is not None:
            columns = int(shape[1])
            tensor_flop += 2 * 16 * columns * 16
            # four warps read 16 columns' elements together; the 64 rows may come from registers
            rows = 0 if _ROWS_IN_REGISTERS.match(operands) else 64
            tensor_bytes += 16 * 2 * (rows + columns) // 4
        elif kind == "HMMA":
            tensor_flop += 2 * 16 * 8 * (8 if ".1688." in name else 16)
        counts[kind] += 1
        if kind == "LDSM":
            matrices = int(name.rsplit(".", 1)[-1]) if name[-1].isdigit() else 1
            widths[kind] += 4 * matrices
        elif kind in ("LDS", "STS", "LDGSTS"):
            found = _WIDTH.search(name)
            widths[kind] += _BYTES[found[1]] if found is not None else 4
    return Loop(counts, widths, len(code), tensor_flop, tensor_bytes)
