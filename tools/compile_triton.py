#!/usr/bin/env python
"""Compile the Triton kernels for GPUs that need not be here, and report what they cost.

Every configuration that the launchers can choose (head dimension, dtype, tables, other operands,
forward and backward) is compiled for the A100 (sm_80), for GPUs with 99 KB of shared memory (sm_86)
and for the H100 (sm_90). The launch records are those of the engine itself, so tile sizes, warps,
stages and specialisations are the ones that would run. The tools inside the Triton wheel then
report registers, stack and shared memory. Exit status 1 if a configuration does not fit: too much
shared memory or stack, or an atomic operation.

With --ledger each inner loop is counted in machine code, and held against the targets (see
tools/triton_ledger.py); exit status 1 if one is missed. --memory writes docs/triton_memory.md.

    python tools/compile_triton.py                      # everything; takes long
    python tools/compile_triton.py --dims 64 --dtypes bf16 --arch 80
    python tools/compile_triton.py --ledger             # bf16, all sizes and tables
    python tools/compile_triton.py --ledger --dims 64 --tables bias --arch 80
    python tools/compile_triton.py --ledger --dims 64 128 --tables none bias --extras features
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from megatron.engines.triton_runtime import Launch

# Bytes per thread that may be in local memory (it is cached, but a loop should not use it):
# on the A100 with tables alone, in half precision, at head dims 32, 64 and 128; with features (sums
# wait there while strips are written); and elsewhere.
STACK_LIMIT, FEATURES_STACK_LIMIT, WIDE_STACK_LIMIT = 128, 2048, 512
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


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
# Operands that a call may have besides, with gradients where they have some.
EXTRAS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "gate": ("key_bias", "sink"),
    "packed": ("first_key",),
    "all": ("key_bias", "first_key", "sink"),
    "dropout": ("dropout",),
    "scaled": ("key_bias", "first_key", "sink", "row_scale"),
    "features": ("features",),
    "every": ("key_bias", "first_key", "sink", "features", "row_scale"),
}
FEATURES, DISTANCES = 16, 100
# The kernels' own sizes, and one of the masked sizes (multiples of 16) below each: masked sizes
# under one power of two give the same code but for constants.
DIMS = (16, 32, 48, 64, 80, 128, 192, 256)
ARCHITECTURES = (80, 86, 89, 90)
# One of each kind of tiles; 89 takes what 86 takes.
KINDS = (80, 86, 90)


@dataclass(frozen=True)
class Configuration:
    """One point of the matrix."""

    head_dim: int
    dtype: str
    tables: str
    arch: int
    extras: str = "plain"

    @property
    def features(self) -> bool:
        return "features" in EXTRAS[self.extras]

    @property
    def stack_limit(self) -> int:
        if self.features:
            return FEATURES_STACK_LIMIT
        narrow = self.dtype != "fp32" and self.head_dim in (32, 64, 128)
        held = narrow and self.extras == "plain" and self.arch == 80
        return STACK_LIMIT if held else WIDE_STACK_LIMIT


@dataclass(frozen=True)
class Report:
    """What the assembler made of one kernel."""

    configuration: Configuration
    kernel: str
    options: dict[str, Any]
    registers: int
    stack_bytes: int
    shared_bytes: int
    atomics: int
    cubin: bytes

    @property
    def fits(self) -> bool:
        from megatron.engines.triton_tiles import SHARED_MEMORY

        return (
            self.stack_bytes <= self.configuration.stack_limit
            and self.shared_bytes <= SHARED_MEMORY[self.configuration.arch]
            and self.atomics == 0
        )

    @property
    def tile(self) -> str:
        if (constants := self.options.get("C")) is not None:
            return f"{constants.BLOCK_M.value}x{constants.BLOCK_N.value}"
        o = self.options
        rows = o.get("BLOCK_M") or o.get("ROWS") or 1
        return f"{rows}x{o.get('DISTANCES') or o.get('BLOCK') or '-'}"

    def row(self) -> tuple[str, ...]:
        c, o = self.configuration, self.options
        return (
            f"sm_{c.arch}", self.kernel, str(c.head_dim), c.dtype, c.tables, c.extras, self.tile,
            str(o.get("num_warps", 4)), str(o.get("num_stages", "-")), str(self.registers),
            str(self.stack_bytes), f"{self.shared_bytes / 1024:.1f}", str(self.atomics),
            "yes" if self.fits else "NO",
        )  # fmt: skip


HEADER = (
    "arch", "kernel", "D", "dtype", "tables", "extras", "tile", "warps", "stages", "registers",
    "stack B", "shared KB", "atomics", "fits",
)  # fmt: skip


class _AbsentGpu:
    """Stands in for Triton's driver: enough to compile, nothing to launch on."""

    def __init__(self, arch: int) -> None:
        import triton

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
    import triton

    config = triton.runtime.driver
    before = config._active
    config.set_active(_AbsentGpu(arch))
    try:
        yield
    finally:
        config._active = before


def attention_launches(configuration: Configuration) -> list[Launch]:
    """The engine's own launch records for a small problem of this configuration."""
    import torch

    from megatron.engines.call import Call
    from megatron.engines.triton_attention import padded_head_dim
    from megatron.engines.triton_launch import backward_launches, forward_launches
    from megatron.engines.triton_problem import build_problem
    from megatron.engines.triton_tiles import SHARED_MEMORY

    heads, length = 2, 160
    dtype = getattr(torch, DTYPES[configuration.dtype])
    head_dim = padded_head_dim(configuration.head_dim, dtype)
    q, k, v, grad = (
        torch.zeros(1, length, heads, head_dim, dtype=dtype).transpose(1, 2) for _ in range(4)
    )
    tables = TABLES[configuration.tables]
    extras = EXTRAS[configuration.extras]
    bias, weight = (torch.zeros(heads, length) if has else None for has in tables[:2])
    call = Call(
        q, k, v, bias, weight,
        key_bias=torch.zeros(1, heads, length) if "key_bias" in extras else None,
        first_key=torch.zeros(1, length, dtype=torch.int32) if "first_key" in extras else None,
        sink=torch.zeros(heads) if "sink" in extras else None,
        row_scale=torch.ones(1, 1, length) if "row_scale" in extras else None,
        scale=0.125, dropout=0.1 if "dropout" in extras else 0.0, seed=torch.tensor(0),
    )  # fmt: skip
    if "features" in extras:
        query = torch.zeros(1, heads, length, FEATURES, dtype=dtype)
        distance = torch.zeros(heads, FEATURES, DISTANCES, dtype=dtype)
        call = replace(call, query_features=query, distance_features=distance)
    arch = configuration.arch
    problem = build_problem(call, visible=None)
    problem = replace(problem, arch=arch, shared_memory=SHARED_MEMORY[arch])
    forward, out, lse = forward_launches(problem)
    learned = {"bias": tables.learned_bias, "weight": tables.learned_weight}
    learned |= {name: name in extras for name in ("key_bias", "row_scale")}
    learned |= dict.fromkeys(("query_features", "distance_features"), "features" in extras)
    wanted = {*"qkv", *(name for name, is_learned in learned.items() if is_learned)}
    backward, _, _ = backward_launches(problem, out, lse, grad, wanted)
    return [*forward, *backward]


def softmax_launches(configuration: Configuration) -> list[Launch]:
    """The fused softmax's launch records, with its largest block; it knows no head dimension."""
    import torch

    from megatron.engines import triton_softmax

    heads, rows, length = 2, 32, 4096
    dtype = getattr(torch, DTYPES[configuration.dtype])
    scores, grad = (torch.zeros(1, heads, rows, length, dtype=dtype),) * 2
    tables = TABLES[configuration.tables]
    bias, weight = (torch.zeros(heads, length) if has else None for has in tables[:2])
    placing = (length, 0.125)
    forward, probs = triton_softmax.forward_launch(scores, bias, weight, placing)
    backward, _, delta = triton_softmax.backward_launch(probs, grad, weight, placing)
    launches = [forward, backward]
    if tables.learned_bias or tables.learned_weight:
        kept = scores if tables.learned_weight else None
        table_settings = (delta, kept, tables.learned_bias, placing)
        launches.append(triton_softmax.table_launch(probs, grad, *table_settings)[0])
    return launches


LAUNCHES = {"attention": attention_launches, "softmax": softmax_launches}


def kernel_name(launch: Launch) -> str:
    name = launch.kernel.fn.__name__.removesuffix("_kernel").removeprefix("attention_")
    if name != "band":
        return name
    terms = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False))["terms"]
    return "steep band" if launch.options["IN_LOOP"] and terms.weight is None else name


def reports_of(configuration: Configuration, kernels: str = "attention") -> list[Report]:
    """Compile all kernels of one configuration, each once."""
    reports: dict[str, Report] = {}
    for launch in LAUNCHES[kernels](configuration):
        if launch.kernel.fn.__name__ == "table_copies_kernel" and configuration.extras != "plain":
            continue  # the same for all
        report = compile_launch(launch, configuration)
        reports[f"{report.kernel} {report.options}"] = report
    return list(reports.values())


def compile_launch(launch: Launch, configuration: Configuration) -> Report:
    """Compile one launch record and ask the binary what it needs."""
    with absent_gpu(configuration.arch):
        compiled = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)
    cubin = compiled.asm["cubin"]
    registers, stack = resources(cubin)
    atomics = len(re.findall(r"^\s*(?:@\S+\s+)?(?:atom|red)\.", compiled.asm["ptx"], re.MULTILINE))
    shared = int(compiled.metadata.shared)
    return Report(
        configuration, kernel_name(launch), launch.options, registers, stack, shared, atomics, cubin
    )


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers per thread, bytes of stack per thread)."""
    from tools.sass import ask

    said = ask("cuobjdump", "-res-usage", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    if found is None:
        raise RuntimeError(f"cuobjdump said nothing about registers: {said}")
    return int(found[1]), int(found[2])


def configurations(
    dims: Iterable[int],
    dtypes: Iterable[str],
    tables: Iterable[str],
    archs: Iterable[int],
    extras: Iterable[str] = ("plain",),
) -> Iterator[Configuration]:
    """The matrix; kernels that some of its points share are compiled once."""
    for arch, dtype, dim, table, extra in itertools.product(archs, dtypes, dims, tables, extras):
        yield Configuration(dim, dtype, table, arch, extra)


def all_configurations() -> list[Configuration]:
    """Every shipped combination of size and tables, and the other operands where they matter."""
    plain = configurations(DIMS, DTYPES, TABLES, KINDS)
    others = [
        extra for extra, operands in EXTRAS.items() if operands and "features" not in operands
    ]
    features = [extra for extra, operands in EXTRAS.items() if "features" in operands]
    return [
        *plain,
        *configurations((64, 128, 256), DTYPES, ("none", "bias", "both"), KINDS, others),
        *configurations((32, 64, 128, 256), DTYPES, ("none", "bias", "both"), KINDS, features),
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ledger", action="store_true", help="count inner loops, hold targets")
    parser.add_argument("--memory", action="store_true", help="write docs/triton_memory.md")
    parser.add_argument("--dims", type=int, nargs="+", help="head dimensions")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES)
    parser.add_argument("--tables", nargs="+", choices=TABLES)
    parser.add_argument("--extras", nargs="+", choices=EXTRAS, default=["plain"])
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHITECTURES, default=list(KINDS))
    parser.add_argument("--kernels", nargs="+", choices=LAUNCHES, default=list(LAUNCHES))
    arguments = parser.parse_args(argv)
    if any(not 1 <= dim <= max(DIMS) for dim in arguments.dims or ()):
        parser.error(f"--dims: must be from 1 to {max(DIMS)}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    from megatron.engines.triton_runtime import interpreted, unavailable

    if (reason := unavailable()) is not None:
        print(reason, file=sys.stderr)
        return 2
    if interpreted():
        print("unset TRITON_INTERPRET: the interpreter does not compile", file=sys.stderr)
        return 2
    if arguments.memory:
        from tools import triton_memory

        return triton_memory.write()
    return _ledger(arguments) if arguments.ledger else _matrix(arguments)


def _ledger(arguments: argparse.Namespace) -> int:
    from tools import triton_ledger

    if "fp32" in (arguments.dtypes or ()):
        # an fp32 product is three TF32 products at half the rate: another ledger
        print("--ledger counts half precision: use --dtypes bf16 or fp16", file=sys.stderr)
        return 2
    return triton_ledger.report(
        configurations(
            arguments.dims or (32, 64, 128, 256),
            arguments.dtypes or ("bf16",),
            arguments.tables or ("bias", "weight", "both"),
            arguments.arch,
            arguments.extras,
        )
    )


def _matrix(arguments: argparse.Namespace) -> int:
    from tools.benchmarks.timing import render_table

    dims = arguments.dims or DIMS
    reports: list[Report] = []
    for kernels in arguments.kernels:
        for configuration in configurations(
            # the softmax knows no head dimension and no matrix product
            dims if kernels == "attention" else dims[:1],
            arguments.dtypes or DTYPES,
            arguments.tables or TABLES,
            arguments.arch,
            arguments.extras if kernels == "attention" else ("plain",),
        ):
            reports += reports_of(configuration, kernels)
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(render_table([HEADER, *(report.row() for report in reports)]))
    bad = [report for report in reports if not report.fits]
    print(f"{len(reports)} kernels compiled, {len(bad)} do not fit")
    return 1 if bad else 0


if __name__ == "__main__":
    from _start import start_main

    start_main(main)
