"""Part 1, the environment: GPU, driver, Triton, C compiler, cache directory, visible devices."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .findings import Finding, Settings, verdict

PART = "environment"


def check(settings: Settings) -> list[Finding]:
    """What the other parts stand on; only a missing GPU or Triton's needs are failures."""
    return [_device(settings), _triton(settings), _compiler(settings), _cache(), _visible(settings)]


def _device(settings: Settings) -> Finding:
    if not settings.on_gpu:
        return Finding(PART, "GPU", "not run", f"the checks run on {settings.device}")
    major, minor = torch.cuda.get_device_capability(settings.device)
    gigabytes = torch.cuda.get_device_properties(settings.device).total_memory / 1e9
    name = torch.cuda.get_device_name(settings.device)
    detail = f"{name}, sm_{major}{minor}, {gigabytes:.0f} GB, CUDA {torch.version.cuda}"
    return Finding(PART, "GPU", verdict(major >= 8), detail)


def _triton(settings: Settings) -> Finding:
    try:
        return Finding(PART, "Triton", "pass", version("triton"))
    except PackageNotFoundError:
        return _missing(settings, "Triton", "not installed: pip install triton")


def _compiler(settings: Settings) -> Finding:
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if found:
        return Finding(PART, "C compiler", "pass", Path(found).name)
    return _missing(settings, "C compiler", "none found; Triton needs one at its first launch")


def _missing(settings: Settings, name: str, detail: str) -> Finding:
    """A failure where a GPU is to be used, and no matter elsewhere."""
    return Finding(PART, name, "fail" if settings.on_gpu else "not run", detail)


def _cache() -> Finding:
    """Many ranks with a cold cache on a network file system disturb each other."""
    place = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton"))
    existing = next(path for path in (place, *place.parents) if path.exists())
    kind = "unknown"
    mounts = Path("/proc/mounts")
    if mounts.exists():
        rows = [line.split()[1:3] for line in mounts.read_text().splitlines()]
        holding = [row for row in rows if str(existing.resolve()).startswith(row[0])]
        kind = max(holding, key=lambda row: len(row[0]))[1] if holding else kind
    network = kind.startswith(("nfs", "lustre", "gpfs", "beegfs"))
    advice = "; set TRITON_CACHE_DIR to a directory of the node" if network else ""
    return Finding(PART, "Triton cache", "pass", f"on {kind}{advice}", {"network": network})


def _visible(settings: Settings) -> Finding:
    names = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "SLURM_LOCALID", "SLURM_NTASKS")
    values = {name: os.environ[name] for name in names if name in os.environ}
    count = torch.cuda.device_count() if settings.on_gpu else 0
    return Finding(PART, "visible devices", "pass", f"{count}", values)
