"""The product's host code with every launch compiled for a GPU that is not here, and emulated."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron.engines import dispatch, triton_attention, triton_problem
from megatron.engines.triton_runtime import Launch
from tests.ptx.findings import Report
from tests.ptx.global_memory import GlobalMemory
from tests.ptx.launch import Order, launch
from tests.ptx.program import program_of
from tools.compile_triton import absent_gpu, kernel_name

# The kinds that a parameter of Triton's may have in PTX; "*" is a pointer.
_KINDS = {"*": ("u64", "b64"), "i64": ("u64", "b64"), "i32": ("u32", "b32"), "fp32": ("f32",)}
# what one block may use, in KB (CUDA C++ programming guide)
_SHARED_KB = {80: 163, 86: 99, 89: 99, 90: 227}
# pointers that Triton adds: global scratch, profile scratch
_SCRATCH = (0, 1, 2)


@dataclass
class Emulation:
    """What the launches of some host code did."""

    arch: int
    order: Order | None = None  # permutes the CTAs of each launch
    track_all: bool = False
    mutate: Callable[[str, str], str] | None = None  # (kernel's name, PTX) -> PTX
    report: Report = field(default_factory=Report)
    launches: Counter[str] = field(default_factory=Counter)

    def run(self, record: Launch) -> None:
        """In place of `Launch.run`."""
        name = kernel_name(record)
        with absent_gpu(self.arch):
            compiled = record.kernel.warmup(*record.arguments, grid=record.grid, **record.options)
        assert compiled.metadata.shared <= 1024 * _SHARED_KB[self.arch], name
        ptx = compiled.asm["ptx"]
        if self.mutate is not None:
            ptx = self.mutate(name, ptx)
        pairs = list(_handed_over(record, compiled.src.signature))
        _check_parameters(ptx, [kind for kind, _ in pairs])
        memory = GlobalMemory([(x, kind) for kind, x in pairs if isinstance(x, Tensor)])
        values = [x.data_ptr() if isinstance(x, Tensor) else x for _, x in pairs]
        shared = compiled.metadata.shared
        found = launch(ptx, record.grid, values, memory, shared, self.order, self.track_all)
        self.report.merge(found, name)
        self.launches[name] += 1


def _handed_over(record: Launch, signature: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What Triton's launcher hands over: tuples opened, constants left out."""
    names = record.kernel.arg_names
    bound = dict(zip(names, record.arguments, strict=False))
    bound |= {name: value for name, value in record.options.items() if name in names}

    def opened(kind: Any, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(kind, tuple):
            for inner, part in zip(kind, value, strict=True):
                yield from opened(inner, part)
        elif kind != "constexpr":
            yield kind, value

    for name in names:
        yield from opened(signature[name], bound[name])


def _check_parameters(ptx: str, kinds: list[str]) -> None:
    parameters = program_of(ptx).module.parameters
    assert len(parameters) - len(kinds) in _SCRATCH, (parameters, kinds)
    for parameter, kind in zip(parameters, kinds, strict=False):
        assert parameter.kind in _KINDS["*" if kind[0] == "*" else kind], (parameter, kind)


@contextlib.contextmanager
def emulated(emulation: Emulation) -> Iterator[Emulation]:
    """Run the Triton engine on CPU tensors in the emulator.

    Only in a process of its own, with a TRITON_CACHE_DIR of its own: kernels are compiled without
    machine code, and Triton keeps them.
    """
    from triton.backends.nvidia.compiler import CUDABackend

    def no_machine_code(*_: Any) -> bytes:
        return b"none"

    with contextlib.ExitStack() as stack:
        for place, name, replacement in (
            (CUDABackend, "make_cubin", no_machine_code),
            (Launch, "run", lambda record: emulation.run(record)),
            (dispatch, "why_not_triton", triton_attention.can_run),
            (triton_attention, "_unsuitable_device", lambda device: None),
            (triton_problem, "architecture", lambda device: emulation.arch),
        ):
            stack.enter_context(patch.object(place, name, replacement))
        stack.enter_context(_empty_memory_is_nan())
        yield emulation


@contextlib.contextmanager
def _empty_memory_is_nan() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill
