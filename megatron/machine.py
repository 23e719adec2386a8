"""GPUs, memory, processes and CPU features of this machine; without torch where possible."""

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
    """Whether a process with this id runs on this machine, whoever owns it."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def set_deepspeed_accelerator() -> None:
    """Set DS_ACCELERATOR=cpu where there is no accelerator: DeepSpeed then does not search.

    To be called before DeepSpeed is imported, in processes that compute. Not in a launcher: its
    children may run on machines with GPUs.
    """
    import torch

    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    disable_undescribed_amx()


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h
_NEVER_TRIMMED = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Let malloc keep what is freed, for a process that allocates the same sizes at every step.

    glibc gives a large block back to the system at once, and the next step's block costs a page
    fault for each 4 KB of it. False where the C library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIMMED))


# AMX, the matrix tiles of a CPU that oneDNN uses for bf16 products.


def disable_undescribed_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Disable AMX where a virtual machine lists it without describing its tiles in CPUID.

    There the first bf16 product ends the process with SIGILL. To be called before that. A value of
    ONEDNN_MAX_CPU_ISA that is set already is kept.
    """
    try:
        lists_tiles = "amx_tile" in cpuinfo.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return
    if lists_tiles and not _tiles_are_described():
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


_TILE_LEAF = 0x1D


def _tiles_are_described() -> bool:
    """Whether CPUID has a leaf of tile palettes with a palette in it; True if unknown."""
    try:
        return _cpuid(0) >= _TILE_LEAF and _cpuid(_TILE_LEAF) > 0
    except OSError:  # executable memory is forbidden here
        return True


def _cpuid(leaf: int) -> int:
    """EAX of a CPUID leaf; Python has no function for it."""
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
