"""What this machine has; asked without importing torch where that is possible."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping
from pathlib import Path

CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def count_gpus(environ: Mapping[str, str] | None = None, device_dir: Path = Path("/dev")) -> int:
    """GPUs that a process started now would see."""
    variables = os.environ if environ is None else environ
    if variables.get("DS_ACCELERATOR") == "cpu":
        return 0
    devices = [entry for entry in device_dir.glob("nvidia*") if entry.name[6:].isdigit()]
    if not devices and (device_dir / "kfd").exists():
        devices = list((device_dir / "dri").glob("renderD*"))
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(devices)
    listed = [item for item in visible.split(",") if item.strip() and item.strip() != "-1"]
    return min(len(listed), len(devices))


def is_running(process: int) -> bool:
    """Whether this machine has a process of that number, anybody's."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def settle_accelerator() -> None:
    """Without an accelerator, say so to DeepSpeed: it would search, and print that it did.

    For processes that compute, before anything imports DeepSpeed; never in a launcher, whose
    children may run on better machines.
    """
    import torch

    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    settle_matrix_tiles()


# A processor's matrix tiles (AMX), which torch multiplies bf16 with.


def settle_matrix_tiles(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Keep torch off tiles that a virtual machine lists but does not describe.

    oneDNN then configures none and the first product in bf16 ends the process with SIGILL. To be
    called before that; whoever sets oneDNN's variable has decided.
    """
    try:
        lists_tiles = "amx_tile" in cpuinfo.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return
    if lists_tiles and not _tiles_are_described():
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


_TILE_LEAF = 0x1D


def _tiles_are_described() -> bool:
    """Whether CPUID has a leaf of tile palettes, and a palette in it; True if nobody can tell."""
    try:
        return _cpuid(0) >= _TILE_LEAF and _cpuid(_TILE_LEAF) > 0
    except OSError:  # no memory that may be executed
        return True


def _cpuid(leaf: int) -> int:
    """EAX of a CPUID leaf, which Python has no other way to ask for."""
    code = (
        b"\x53"  # push rbx
        b"\xb8" + leaf.to_bytes(4, "little") +  # mov eax, leaf
        b"\x31\xc9"  # xor ecx, ecx
        b"\x0f\xa2"  # cpuid
        b"\x5b"  # pop rbx
        b"\xc3"  # ret
    )  # fmt: skip
    everything = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=everything)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return int(ctypes.CFUNCTYPE(ctypes.c_uint32)(address)())


def memory_bytes() -> int | None:
    """Main memory that this process may use: the machine's, or its container's if that is less."""
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    for path in CGROUP_LIMITS:
        try:
            text = path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text.isdigit():
            found = min(found, int(text))
    return found
