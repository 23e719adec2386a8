"""What this machine has; asked without importing torch where that is possible."""

from __future__ import annotations

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
