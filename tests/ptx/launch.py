"""Run all CTAs of a grid, in gangs that run side by side."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.ptx.arithmetic import BITS, WIDTH, DivergedError, f4, f8, u4, u8
from tests.ptx.findings import PtxError, Report
from tests.ptx.gang import Block
from tests.ptx.global_memory import GlobalMemory
from tests.ptx.machine import Machine
from tests.ptx.program import Program, program_of

GANG_THREADS = 2048  # a gang has at most so many threads
_TRACKED = 3  # races are looked for in every third gang: they are a matter of code, not of place

Order = Callable[[int], Sequence[int]]


def launch(
    ptx: str,
    grid: Sequence[int],
    values: Sequence[Any],
    memory: GlobalMemory,
    shared_bytes: int,
    order: Order | None = None,
    track_all: bool = False,
) -> Report:
    """`values` are numbers and addresses; `order` permutes the gangs."""
    program, report = program_of(ptx), Report()
    for line in program.unwaited:
        report.add("uses what wgmma still writes", line, program.source_of(line))
    threads = program.module.threads
    block = Block(threads, shared_bytes, _granule(ptx), report, program.source_of)
    parameters = _packed(program, values)
    x_size, y_size, z_size = (*grid, 1, 1)[:3]
    places = [(x, y, z) for z in range(z_size) for y in range(y_size) for x in range(x_size)]
    waiting = _gangs(places, max(1, GANG_THREADS // threads))
    if order is not None:
        waiting = [waiting[i] for i in order(len(waiting))]
    turn = 0
    with np.errstate(all="ignore"):
        while waiting:
            numbers = waiting.pop()
            tracking = track_all or turn % _TRACKED == 0
            turn += 1
            machine = Machine(block, memory, [places[n] for n in numbers], numbers, tracking)
            try:
                program.run(machine, parameters, (x_size, y_size, z_size))
            except DivergedError as error:
                # from the beginning, apart: a CTA that runs twice writes the same
                ways = list(zip(numbers, error.args[0], strict=True))
                waiting += [[n for n, way in ways if way], [n for n, way in ways if not way]]
            except Exception as error:
                raise PtxError(_told(program, numbers, error)) from error
    return report


def _granule(ptx: str) -> int:
    """The narrowest access to shared memory, at most 4 bytes."""
    for kind, width in (("8", 1), ("16", 2)):
        if re.search(rf"\.shared\.(v\d\.)?[bus]{kind}\b", ptx):
            return width
    return 4


def _packed(program: Program, values: Sequence[Any]) -> list[Any]:
    """The parameters' bits; Triton's own scratch pointers, which come last, are 0."""
    out: list[Any] = []
    for parameter, value in zip(program.module.parameters, values, strict=False):
        if parameter.kind == "f32":
            out.append(f4(value).view(u4))
        elif parameter.kind == "f64":
            out.append(f8(value).view(u8))
        else:
            width = WIDTH[parameter.kind]
            bits = int(value) & ((1 << 8 * width) - 1)
            out.append(BITS[width](bits) if width >= 4 else u4(bits))
    return out + [u8(0)] * (len(program.module.parameters) - len(out))


def _gangs(places: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """CTAs that differ in their last axes mostly branch alike."""
    alike: dict[int, list[int]] = {}
    for number, place in enumerate(places):
        alike.setdefault(place[0], []).append(number)
    return [group[i : i + size] for group in alike.values() for i in range(0, len(group), size)]


def _told(program: Program, numbers: Sequence[int], error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    inner = [frame.lineno for frame in frames if frame.filename == program.file]
    where = program.describe(inner[-1] if inner else None)
    kernel = f"{program.module.name} ctas {list(numbers[:4])}"
    return f"{kernel}: {where}: {type(error).__name__}: {error}"
