#!/usr/bin/env python
"""Compile the Triton kernels for GPUs that need not be here, and report what they cost.

Every configuration that the launchers can choose (head dimension, dtype, tables, forward and
backward) is compiled for the A100 (sm_80) and the H100 (sm_90). The launch records are those of
the engine itself, so tile sizes, warps, stages and specialisations are the ones that would run.
The assembler inside the Triton wheel (`ptxas -v`) then reports registers, spills and shared
memory. Exit status 1 if any configuration spills registers or needs more shared memory than a
block can have.

    python tools/compile_triton.py                      # everything
    python tools/compile_triton.py --dims 64 --dtypes bf16 --arch 80
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.model.kernels.triton_compat import Launch, triton, unavailable
from megatron.model.kernels.triton_launch import (
    Problem,
    backward_launches,
    forward_launch,
)

# What one block may use, in bytes (CUDA C++ programming guide, "maximum amount of shared memory
# per thread block": 163 KB for 8.0, 227 KB for 9.0).
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TABLES = {
    "none": (False, False),
    "bias": (True, False),
    "weight": (False, True),
    "both": (True, True),
}
DIMS = (32, 64, 80, 96, 128, 160, 192, 256)


@dataclass(frozen=True)
class Configuration:
    """One point of the matrix."""

    head_dim: int
    dtype: str
    tables: str
    arch: int
    precision: str = "tf32x3"
    pruned: bool = False


@dataclass(frozen=True)
class Report:
    """What the assembler says of one compiled kernel."""

    configuration: Configuration
    kernel: str
    options: dict[str, Any]
    registers: int
    spill_bytes: int
    shared_bytes: int

    @property
    def fits(self) -> bool:
        return self.spill_bytes == 0 and self.shared_bytes <= SHARED_LIMIT[self.configuration.arch]

    def row(self) -> tuple[str, ...]:
        c, o = self.configuration, self.options
        block = f"{o.get('BLOCK_M', o.get('BLOCK'))}x{o.get('BLOCK_N', o.get('BLOCK', '-'))}"
        dtype = f"{c.dtype}/{c.precision}" if c.dtype == "fp32" else c.dtype
        return (
            f"sm_{c.arch}", self.kernel, str(c.head_dim), dtype, c.tables, block,
            str(o.get("num_warps", 4)), str(o.get("num_stages", "-")), str(self.registers),
            str(self.spill_bytes), f"{self.shared_bytes / 1024:.1f}", "yes" if self.fits else "NO",
        )  # fmt: skip


HEADER = (
    "arch", "kernel", "D", "dtype", "tables", "block", "warps", "stages", "registers",
    "spill B", "shared KB", "fits",
)  # fmt: skip


class _AbsentGpu:
    """Stands in for Triton's driver: enough to compile, nothing to launch on."""

    def __init__(self, arch: int) -> None:
        self._target = triton.backends.compiler.GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        # Triton keeps compiled kernels per device: one imaginary device per architecture
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def absent_gpu(arch: int) -> Iterator[None]:
    """Make Triton compile for `arch` whether or not there is a GPU."""
    config = triton.runtime.driver
    before = config._active
    config.set_active(_AbsentGpu(arch))
    try:
        yield
    finally:
        config._active = before


def attention_launches(configuration: Configuration) -> list[Launch]:
    """The engine's own launch records for a small problem of this configuration."""
    heads, length = 2, 160
    dtype = DTYPES[configuration.dtype]
    q, k, v, grad = (
        torch.zeros(1, length, heads, configuration.head_dim, dtype=dtype).transpose(1, 2)
        for _ in range(4)
    )
    has_bias, has_weight = TABLES[configuration.tables]
    table = torch.zeros(heads, length)
    problem = Problem(
        q, k, v,
        table if has_bias else None,
        table if has_weight else None,
        torch.full((heads,), length, dtype=torch.int32) if configuration.pruned else None,
        length, 0.125, configuration.precision,
    )  # fmt: skip
    forward, out, lse = forward_launch(problem)
    backward, _ = backward_launches(
        problem, out, lse, grad, table_grads=(has_bias, has_weight), processors=108
    )
    return [forward, *backward]


def compile_launch(launch: Launch, configuration: Configuration) -> Report:
    """Compile one launch record and ask ptxas what it needs."""
    with absent_gpu(configuration.arch):
        compiled = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)
    registers, spills = assemble(compiled.asm["ptx"], configuration.arch)
    name = launch.kernel.fn.__name__.removesuffix("_kernel").removeprefix("attention_")
    return Report(
        configuration, name, launch.options, registers, spills, int(compiled.metadata.shared)
    )


def _ptxas(arch: int) -> list[str]:
    """The assembler that Triton itself uses for this architecture, with its options."""
    from triton.backends.nvidia.compiler import get_ptxas

    return [str(get_ptxas(arch).path), "--regAllocOptLevel=2"]


def assemble(ptx: str, arch: int) -> tuple[int, int]:
    """(registers per thread, spilled bytes) from `ptxas -v`."""
    target = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        result = subprocess.run(
            [*_ptxas(arch), "-v", f"--gpu-name={target[1]}", str(source), "-o", f"{folder}/cubin"],
            capture_output=True,
            text=True,
        )
    if result.returncode != 0:
        raise RuntimeError(f"ptxas for {target[1]} failed:\n{result.stdout}{result.stderr}")
    used = re.search(r"Used (\d+) registers", result.stderr)
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", result.stderr)
    if used is None or spilled is None:
        raise RuntimeError(f"ptxas -v said nothing about registers or spills:\n{result.stderr}")
    return int(used[1]), int(spilled[1]) + int(spilled[2])


def configurations(
    dims: Iterable[int], dtypes: Iterable[str], tables: Iterable[str], archs: Iterable[int]
) -> Iterator[Configuration]:
    """The matrix: fp32 in both of its precisions, the pruned walk with the bias tables."""
    for arch, dtype, dim, table in itertools.product(archs, dtypes, dims, tables):
        precisions = ("tf32x3", "tf32") if dtype == "fp32" else ("tf32x3",)
        for precision in precisions:
            yield Configuration(dim, dtype, table, arch, precision, pruned=table != "none")


def print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dims", type=int, nargs="+", default=list(DIMS), help="head dimensions")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument(
        "--arch", type=int, nargs="+", choices=SHARED_LIMIT, default=list(SHARED_LIMIT)
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    if (reason := unavailable()) is not None:
        print(reason, file=sys.stderr)
        return 2
    reports = []
    for configuration in configurations(
        arguments.dims, arguments.dtypes, arguments.tables, arguments.arch
    ):
        for launch in attention_launches(configuration):
            reports.append(compile_launch(launch, configuration))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print_table([HEADER, *(report.row() for report in reports)])
    bad = [report for report in reports if not report.fits]
    print(f"{len(reports)} kernels compiled, {len(bad)} do not fit")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
