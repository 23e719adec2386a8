"""Builds the C++ engine at first use, once per machine, and loads it.

The sources in cpp/ compile in seconds to a shared library for this CPU. It is kept in a cache
directory under a name that changes with the sources, the compiler and the CPU. Without a compiler,
or if the build fails, there is one warning and the PyTorch implementation is used.

Environment: KERPLE_TILED_BACKEND = auto | compiled | python; KERPLE_CACHE_DIR; CXX.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from filelock import FileLock, Timeout

from megatron.atomic_files import temporary_name
from megatron.errors import EngineError

_SOURCES = Path(__file__).parent / "cpp"
_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
_CPU_FLAGS = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler takes
_TIMEOUT_SECONDS = 120.0


class BuildError(RuntimeError):
    """Why the C++ library could not be built."""


def load_library() -> ctypes.CDLL | None:
    """The compiled library, built if needed; None if it cannot be built or is switched off."""
    backend = os.environ.get("KERPLE_TILED_BACKEND", "auto")
    if backend not in ("auto", "compiled", "python"):
        raise EngineError(
            f"KERPLE_TILED_BACKEND={backend!r} is unknown; use auto, compiled or python"
        )
    if backend == "python":
        return None
    library = _load_once()
    if library is None and backend == "compiled":
        raise EngineError(
            "KERPLE_TILED_BACKEND=compiled, but the C++ engine cannot be built (see the warning);"
            " install a C++17 compiler with OpenMP, or use auto"
        )
    return library


def warmup() -> bool:
    """Compile and load the CPU engine now, not in the first call; whether there is a compiled one.

    The first time on a machine a compiler runs for some seconds.
    """
    return load_library() is not None


@functools.cache
def _load_once() -> ctypes.CDLL | None:
    try:
        path = _build()
        try:
            return _open(path)
        except (OSError, AttributeError):  # a broken library in the cache is built again
            path.unlink(missing_ok=True)
            return _open(_build())
    except (BuildError, OSError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"attention engine 'tiled': no compiled C++ version ({error}); using the PyTorch one,"
            " which gives the same numbers more slowly",
            stacklevel=2,
        )
        return None


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name in ("attention_forward", "attention_backward"):
        getattr(library, name).restype = None
    for name in ("attention_problem_size", "attention_vector_length", "attention_has_bf16"):
        getattr(library, name).restype = ctypes.c_int64
    return library


def _build() -> Path:
    compiler = _find_compiler()
    target = _cache_directory() / f"attention-{_fingerprint(compiler)}.so"
    lock = target.with_suffix(".lock")
    try:
        if not target.exists():
            with FileLock(lock, timeout=_TIMEOUT_SECONDS):
                if not target.exists():  # another process may have built it meanwhile
                    said = f"compiling the CPU attention engine with {Path(compiler).name}"
                    print(f"{said}, once on this machine...", file=sys.stderr, flush=True)
                    _compile(compiler, target)
    except Timeout as error:  # fall back instead of blocking a training run
        raise BuildError(f"another process holds {lock}") from error
    return target


def _find_compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path is not None:
            return path
    raise BuildError("no C++ compiler found; set CXX or install g++")


def _fingerprint(compiler: str) -> str:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=True, timeout=_TIMEOUT_SECONDS
    ).stdout
    digest = hashlib.sha256(version)
    digest.update(
        repr((compiler, _FLAGS, _CPU_FLAGS, platform.machine(), _cpu_features())).encode()
    )
    for source in sorted(_SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h"):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_features() -> str:
    """What -march=native depends on: nodes of different CPUs may share one cache directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))


def _cache_directory() -> Path:
    shared = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    base = Path(os.environ.get("KERPLE_CACHE_DIR") or shared / "kerple-neox")
    try:
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not is_private(base):
            base = base / f"user-{os.getuid()}"  # base is shared, or a symbolic link
            base.mkdir(exist_ok=True, mode=0o700)
        if not is_private(base):
            raise PermissionError(f"{base} is owned or writable by another user")
        with tempfile.NamedTemporaryFile(dir=base):
            return base
    except OSError:  # a read-only home: build for this process alone, in a private directory
        return Path(tempfile.mkdtemp(prefix="kerple-neox-"))


def is_private(directory: Path) -> bool:
    """Whether no other user can write into the directory or replace it by another one."""
    about = directory.lstat()
    ours = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()
    above = [folder.stat() for folder in directory.resolve().parents]
    renamed_by_others = any(
        folder.st_uid not in (0, os.getuid())
        or (folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX)
        for folder in above
    )
    return ours and not about.st_mode & 0o022 and not renamed_by_others


def _compile(compiler: str, target: Path) -> None:
    errors = ""
    for cpu_flags in _CPU_FLAGS:
        temporary = temporary_name(target)
        command = [compiler, *_FLAGS, *cpu_flags, "-o", str(temporary)]
        try:
            result = subprocess.run(
                [*command, str(_SOURCES / "attention.cpp")],
                capture_output=True,
                text=True,
                check=False,
                timeout=_TIMEOUT_SECONDS,
            )
            if result.returncode == 0:
                with temporary.open("rb+") as file:
                    os.fsync(file.fileno())
                temporary.replace(target)
                return
        finally:
            temporary.unlink(missing_ok=True)
        errors = result.stderr.strip().splitlines()[0] if result.stderr.strip() else "no message"
    raise BuildError(f"{Path(compiler).name} failed: {errors}")
