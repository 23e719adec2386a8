"""Write docs/triton_memory.md: the shared memory of every tile, on each kind of GPU.

    python tools/compile_triton.py --memory    # about 300 kernels: a quarter of an hour

A tile's largest need is with all operands. Two tables need more than one, so that a row without a
weight table is measured with a bias table, and a row with it with both. In fp32 the tiles are the
same with a weight table and without. Rows with features are measured with a row scale as well.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.engines.triton_tiles import KERNELS, SHARED_MEMORY, tiles_of
from tools.compile_triton import (
    KINDS,
    Configuration,
    absent_gpu,
    attention_launches,
    kernel_name,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "triton_memory.md"
HEAD = """# Shared memory of the Triton kernels

Written by `tools/compile_triton.py --memory` with Triton {version}; do not edit. A cell is a tile
(queries x keys, warps, stages) and the bytes of shared memory that its kernel needs with all
operands. A program may take {limits}.
"steep band" is the band kernel that reads its table inside the loop; with a weight table there is
one band kernel. All operands are those without a row scale; in rows with features, with it.

"""
HEADER = (
    "kernel",
    "head dim",
    "dtype",
    "weight table",
    "features",
    *(f"sm_{arch}" for arch in KINDS),
)


class Row(NamedTuple):
    kernel: str
    dim: int
    dtype: str
    weighted: bool
    features: bool = False

    @property
    def cells(self) -> tuple[str, ...]:
        weighted = "yes" if self.weighted else "no"
        weighted = "any" if self.dtype == "fp32" else weighted
        return self.kernel, str(self.dim), self.dtype, weighted, "yes" if self.features else "no"

    def tile(self, arch: int) -> str:
        """As the engine chooses it."""
        dtype = torch.float32 if self.dtype == "fp32" else torch.bfloat16
        operands = (self.dim, dtype, self.weighted, arch, SHARED_MEMORY[arch], self.features)
        t = tiles_of(self.kernel, *operands)
        return f"{t.queries}x{t.keys} w{t.warps} s{t.stages}"


def rows() -> Iterator[Row]:
    """Every tile that the engine can choose; fp16 takes those of bf16."""
    for dtype in ("bf16", "fp32"):
        for dim, features in product((32, 64, 128, 256), (False, True)):
            for weighted in (True,) if dtype == "fp32" else (False, True):
                kernels: Sequence[str] = KERNELS if weighted else (*KERNELS, "steep band")
                if features and not weighted:  # whose bands have no strips
                    kernels = KERNELS[:3]
                yield from (Row(kernel, dim, dtype, weighted, features) for kernel in kernels)


def measured(arch: int, dtypes: Sequence[str] = ("bf16", "fp32")) -> dict[Row, int]:
    """Bytes of shared memory by compiling all kernels for one kind of GPU."""
    found: dict[Row, int] = {}
    wanted = [row for row in rows() if row.dtype in dtypes]
    for dim, dtype, weighted, features in dict.fromkeys(row[1:] for row in wanted):
        tables = "both" if weighted else "bias"
        configuration = Configuration(dim, dtype, tables, arch, "every" if features else "all")
        for launch in attention_launches(configuration):
            row = Row(kernel_name(launch), dim, dtype, weighted, features)
            if row in wanted:
                with absent_gpu(arch):
                    made = launch.kernel.warmup(
                        *launch.arguments, grid=launch.grid, **launch.options
                    )
                found[row] = int(made.metadata.shared)
        print(".", end="", file=sys.stderr, flush=True)
    return found


def render(shared: dict[int, dict[Row, int]], version: str) -> str:
    limits = ", ".join(f"{SHARED_MEMORY[arch]:,} bytes on sm_{arch}" for arch in KINDS)
    lines = [
        HEAD.format(version=version, limits=limits) + _line(HEADER),
        _line(["---"] * len(HEADER)),
    ]
    for row in rows():
        cells = [f"{row.tile(arch)}: {shared[arch][row]:,}" for arch in KINDS]
        lines.append(_line([*row.cells, *cells]))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def parse(page: str) -> dict[tuple[str, ...], list[tuple[str, int]]]:
    """The page's rows: the first five cells, then a tile and its bytes for each kind of GPU."""
    found = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == len(HEADER) and ": " in cells[-1]:
            pairs = [cell.split(": ") for cell in cells[5:]]
            found[tuple(cells[:5])] = [(tile, int(size.replace(",", ""))) for tile, size in pairs]
    return found


def write() -> int:
    import triton

    PAGE.write_text(render({arch: measured(arch) for arch in KINDS}, triton.__version__))
    return 0
