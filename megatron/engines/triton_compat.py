"""Triton where it is installed, and harmless stand-ins where it is not.

The kernel modules import `jit` and `tl` from here, so that they can be imported (and
read by tools that walk the package) on a machine without Triton. Nothing can be launched there:
`unavailable()` says why.
"""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.engines.triton_cache import compile_turn, use_node_local_cache

__all__ = [
    "Launch",
    "cdiv",
    "constant",
    "device_of",
    "interpreted",
    "jit",
    "launcher_problem",
    "next_power_of_2",
    "tl",
    "triton",
    "unavailable",
]

triton: Any = None
tl: Any = None
_import_error = ""
try:
    import triton as _triton
    import triton.language as _language

    triton, tl = _triton, _language
except ImportError as error:
    _import_error = str(error)


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit(**options)`, or no change at all without Triton."""
    if triton is None:
        return lambda function: function
    decorate: Callable[[Callable[..., Any]], Any] = triton.jit(**options)
    return decorate


def constant(value: float) -> Any:
    """A number that kernels may use by its name."""
    return value if tl is None else tl.constexpr(value)


def unavailable() -> str | None:
    """Why Triton cannot be used at all here, or None."""
    if triton is None:
        return f"Triton is not installed ({_import_error}); pip install triton"
    if not hasattr(triton, "knobs"):
        return f"Triton {triton.__version__} is too old; pip install 'triton>=3.4'"
    return None


@functools.cache
def launcher_problem() -> str | None:
    """Why Triton cannot launch on this machine's GPU, or None.

    Before its first launch Triton compiles a small C file, unless its cache has it already. Doing
    that now turns a crash in the first step into a reason at the start.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        use_node_local_cache()
    try:
        with compile_turn("launcher"):
            _ = triton.runtime.driver.active.utils
    except Exception as error:  # whatever a compiler, a linker or the file system may say
        told = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"Triton cannot build its launcher ({told}){_compiler_advice()}"
    return None


def _compiler_advice() -> str:
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "; this node has no C compiler: load gcc or clang on every node, or set CC"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        return f"; {header} is missing: install Python's headers on every node"
    return "; set TRITON_CACHE_DIR to a directory that holds it, built on a node like this one"


def interpreted() -> bool:
    """True when kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1)."""
    return unavailable() is None and bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class Launch:
    """One kernel launch: `kernel[grid](*arguments, **options)`."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        with compile_turn((self.kernel, *self.options.values())):
            self.kernel[self.grid](*self.arguments, **self.options)


def device_of(x: Tensor) -> Any:
    """Context in which kernels run on x's GPU (Triton launches on the current one)."""
    return torch.cuda.device(x.device if x.is_cuda else -1)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
