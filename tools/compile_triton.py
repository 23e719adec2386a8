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
import functools
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.engines import triton_softmax
from megatron.engines.triton_attention import padded_head_dim
from megatron.engines.triton_compat import Launch, interpreted, triton, unavailable
from megatron.engines.triton_launch import Problem, backward_launches, forward_launch

# What one block may use, in bytes (CUDA C++ programming guide, "maximum amount of shared memory
# per thread block": 163 KB for 8.0, 227 KB for 9.0).
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Tables(NamedTuple):
    """Which tables there are, and which of them are learned."""

    bias: bool = False
    weight: bool = False
    learned_bias: bool = False
    learned_weight: bool = False


TABLES = {
    "none": Tables(),
    "bias": Tables(bias=True, learned_bias=True),
    "weight": Tables(weight=True, learned_weight=True),
    "both": Tables(True, True, True, True),
    "fixed-bias": Tables(bias=True),
    "fixed-weight": Tables(weight=True),
    "fixed-both": Tables(bias=True, weight=True),
    "bias+fixed-weight": Tables(bias=True, weight=True, learned_bias=True),
    "weight+fixed-bias": Tables(bias=True, weight=True, learned_weight=True),
}
# The kernels' own sizes, and one of the masked sizes (multiples of 16) below each: masked sizes
# under one power of two give the same code but for constants.
DIMS = (16, 32, 48, 64, 80, 128, 192, 256)
ARCHITECTURES = tuple(SHARED_LIMIT)


@dataclass(frozen=True)
class Configuration:
    """One point of the matrix."""

    head_dim: int
    dtype: str
    tables: str
    arch: int


@dataclass(frozen=True)
class Report:
    """What the assembler says of one compiled kernel."""

    configuration: Configuration
    kernel: str
    options: dict[str, Any]
    registers: int
    spill_bytes: int
    shared_bytes: int
    atomics: int

    @property
    def fits(self) -> bool:
        limit = SHARED_LIMIT[self.configuration.arch]
        return self.spill_bytes == 0 and self.shared_bytes <= limit and self.atomics == 0

    def row(self) -> tuple[str, ...]:
        c, o = self.configuration, self.options
        rows = o.get("BLOCK_M") or o.get("QUERIES") or o.get("ROWS") or 1
        columns = o.get("BLOCK_N") or o.get("KEYS") or o.get("DISTANCES") or o.get("BLOCK") or "-"
        block = f"{rows}x{columns}"
        return (
            f"sm_{c.arch}", self.kernel, str(c.head_dim), c.dtype, c.tables, block,
            str(o.get("num_warps", 4)), str(o.get("num_stages", "-")), str(self.registers),
            str(self.spill_bytes), f"{self.shared_bytes / 1024:.1f}", str(self.atomics),
            "yes" if self.fits else "NO",
        )  # fmt: skip


HEADER = (
    "arch", "kernel", "D", "dtype", "tables", "block", "warps", "stages", "registers",
    "spill B", "shared KB", "atomics", "fits",
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
    head_dim = padded_head_dim(configuration.head_dim, dtype)
    q, k, v, grad = (
        torch.zeros(1, length, heads, head_dim, dtype=dtype).transpose(1, 2) for _ in range(4)
    )
    tables = TABLES[configuration.tables]
    bias, weight = (torch.zeros(heads, length) if has else None for has in tables[:2])
    visible = torch.full((heads,), length, dtype=torch.int32)
    problem = Problem(q, k, v, bias, weight, visible, length, 0.125)
    forward, out, lse = forward_launch(problem)
    backward, _ = backward_launches(
        problem,
        out,
        lse,
        grad,
        table_grads=(tables.learned_bias, tables.learned_weight),
        processors=108,
    )
    return [forward, *backward]


def softmax_launches(configuration: Configuration) -> list[Launch]:
    """The fused softmax's launch records, with its largest block; it knows no head dimension."""
    heads, rows, length = 2, 32, 4096
    scores, grad = (torch.zeros(1, heads, rows, length, dtype=DTYPES[configuration.dtype]),) * 2
    tables = TABLES[configuration.tables]
    bias, weight = (torch.zeros(heads, length) if has else None for has in tables[:2])
    settings = (0.125, length, length - rows)
    forward, probs = triton_softmax.forward_launch(scores, bias, weight, *settings)
    backward, _, delta = triton_softmax.backward_launch(probs, grad, weight, *settings)
    launches = [forward, backward]
    if tables.learned_bias or tables.learned_weight:
        kept = scores if tables.learned_weight else None
        table_settings = (kept, delta, tables.learned_bias, *settings)
        launches.append(triton_softmax.table_launch(probs, grad, *table_settings)[0])
    return launches


LAUNCHES = {"attention": attention_launches, "softmax": softmax_launches}


def reports_of(configuration: Configuration, kernels: str = "attention") -> list[Report]:
    """Compile all kernels of one configuration."""
    return [compile_launch(launch, configuration) for launch in LAUNCHES[kernels](configuration)]


def compile_launch(launch: Launch, configuration: Configuration) -> Report:
    """Compile one launch record and ask ptxas what it needs."""
    with absent_gpu(configuration.arch):
        compiled = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)
    ptx = compiled.asm["ptx"]
    registers, spills = assemble(ptx, configuration.arch)
    atomics = len(re.findall(r"^\s*(?:@\S+\s+)?(?:atom|red)\.", ptx, re.MULTILINE))
    name = launch.kernel.fn.__name__.removesuffix("_kernel").removeprefix("attention_")
    shared = int(compiled.metadata.shared)
    return Report(configuration, name, launch.options, registers, spills, shared, atomics)


def _ptxas(arch: int) -> list[str]:
    """The assembler that Triton itself uses for this architecture, with its options."""
    from triton.backends.nvidia.compiler import get_ptxas

    return [str(get_ptxas(arch).path), "--regAllocOptLevel=2"]


@functools.cache  # configurations share kernels: fixed and learned tables have one forward
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
    """The matrix; kernels that some of its points share are compiled once."""
    for arch, dtype, dim, table in itertools.product(archs, dtypes, dims, tables):
        yield Configuration(dim, dtype, table, arch)


def all_configurations() -> list[Configuration]:
    return list(configurations(DIMS, DTYPES, TABLES, ARCHITECTURES))


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
        "--arch", type=int, nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES)
    )
    parser.add_argument("--kernels", nargs="+", choices=LAUNCHES, default=list(LAUNCHES))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    if (reason := unavailable()) is not None:
        print(reason, file=sys.stderr)
        return 2
    if interpreted():
        print("unset TRITON_INTERPRET: the interpreter does not compile", file=sys.stderr)
        return 2
    reports: list[Report] = []
    for kernels in arguments.kernels:
        # the softmax knows no head dimension and no matrix product
        dims = arguments.dims if kernels == "attention" else arguments.dims[:1]
        for configuration in configurations(
            dims, arguments.dtypes, arguments.tables, arguments.arch
        ):
            reports += reports_of(configuration, kernels)
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print_table([HEADER, *(report.row() for report in reports)])
    bad = [report for report in reports if not report.fits]
    print(f"{len(reports)} kernels compiled, {len(bad)} do not fit")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
