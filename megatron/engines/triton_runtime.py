"""Triton if it is installed, placeholders if not, and its compile cache on a cluster.

The kernel modules import `jit` and `tl` from here, so that they can be imported without Triton.
Nothing can be launched then: `unavailable()` gives the reason.

Triton keeps what it compiles below the home directory. On a cluster that is often one network file
system for all nodes, and hundreds of ranks that compile the same kernels into it at once crash or
wait. In a job of several ranks `use_node_local_cache` moves the cache to the node's own disk before
the first launch; from then on the first launch of each kernel takes its turn behind a lock on that
disk: the first rank of the node compiles, the others wait for it and load what it made.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from megatron.engines.cpp_build import is_private

# Triton 3.6 and older do not compile the attention kernels.
MINIMUM_TRITON = (3, 7)
# The Triton that torch's CUDA wheels require, from their metadata; CPU wheels require none.
TRITON_OF_TORCH = {"2.13.0": "3.7.1"}
# How long a rank waits for others of its node that compile.
TURN_SECONDS = 600.0
# How many programs CUDA allows along the second and third axis of a grid.
MAX_GRID_YZ = 65535

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


def constant(value: float | str) -> Any:
    """A value that kernels may use by its name."""
    return value if tl is None else tl.constexpr(value)


@torch.compiler.assume_constant_result
def unavailable() -> str | None:
    """Why Triton cannot be used at all here, or None."""
    if triton is None:
        return f"Triton is not installed ({_import_error}); pip install triton"
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < MINIMUM_TRITON:
        least = ".".join(map(str, MINIMUM_TRITON))
        torch_version, brings = next(reversed(TRITON_OF_TORCH.items()))
        return (
            f"Triton {triton.__version__} is too old, its compiler fails on these kernels; "
            f"pip install 'triton>={least}' (torch {torch_version} for CUDA brings {brings})"
        )
    return None


# The cache of compiled kernels.

_folder: Path | None = None
_launched: set[Hashable] = set()


def use_node_local_cache() -> Path:
    """Set TRITON_CACHE_DIR to a private directory on this node, unless it is set; return it."""
    global _folder
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or _private_folder())
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    _folder = folder
    return folder


def _private_folder() -> Path:
    base = Path(os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir())
    folder = base / f"kerple-triton-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if is_private(folder):
        return folder
    return Path(tempfile.mkdtemp(prefix="kerple-triton-", dir=base))


@contextlib.contextmanager
def compile_turn(kernel: Hashable) -> Iterator[None]:
    """Context of a launch: a kernel's first launch waits until no other process compiles here.

    At most TURN_SECONDS: then it compiles what another process may be compiling, too.
    """
    if _folder is None or kernel in _launched:
        yield
        return
    lock = FileLock(_folder / "compiling.lock")
    with contextlib.suppress(Timeout):
        lock.acquire(timeout=TURN_SECONDS)
    try:
        yield
    finally:
        lock.release()
    _launched.add(kernel)


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
    except Exception as error:  # from the compiler, the linker or the file system
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


@torch.compiler.assume_constant_result
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

    @property
    def variant(self) -> Hashable:
        """What Triton compiles once for: kernel, options and the kinds of the arguments."""
        return self.kernel, str(self.options), _kinds(self.arguments)

    def run(self) -> None:
        with compile_turn(self.variant) if _folder else contextlib.nullcontext():
            self.kernel[self.grid](*self.arguments, **self.options)


def _kinds(arguments: tuple[Any, ...]) -> tuple[Hashable, ...]:
    """Of each argument, and inside of tuples: a tensor's dtype, whether 16 divides, or None."""
    kinds: list[Hashable] = []
    for argument in arguments:
        if isinstance(argument, tuple):
            kinds.append(_kinds(argument))
        elif isinstance(argument, int):
            kinds.append(argument % 16 == 0)
        else:
            dtype: Hashable = getattr(argument, "dtype", None)
            kinds.append(dtype)
    return tuple(kinds)


def run_on(x: Tensor, *launches: Launch) -> None:
    """Run launches on x's GPU: Triton launches on the current one."""
    with torch.cuda.device(x.device if x.is_cuda else -1):
        for launch in launches:
            launch.run()


def grid_problem(batch: int, heads: int) -> str | None:
    """Why a grid (blocks, heads, batch) cannot be launched, with the fix; None if it can."""
    if max(batch, heads) <= MAX_GRID_YZ:
        return None
    return (
        f"batch {batch} and heads {heads}: a GPU's grid has at most {MAX_GRID_YZ} of each; "
        "split the batch"
    )


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
