"""What a check found, and the file it goes into."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

Status = Literal["pass", "fail", "not run", "measured"]


@dataclass(frozen=True)
class Finding:
    """One checked fact (`pass`, `fail`), one number (`measured`), or why it was `not run`."""

    part: str
    name: str
    status: Status
    detail: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"{self.status:<9}{self.part:<13}{self.name}{': ' if self.detail else ''}{self.detail}"
        )


@dataclass(frozen=True)
class Settings:
    """Where the checks run, a folder for what they write, and the short form that tests use."""

    device: torch.device
    scratch: Path
    quick: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def verdict(good: object) -> Status:
    """`pass` or `fail`."""
    return "pass" if good else "fail"


def first_line(error: Exception) -> str:
    """What an error says, in one short line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def guarded(part: str, name: str, check: Callable[[], Finding]) -> Finding:
    """A check that raises has failed; the others go on."""
    try:
        return check()
    except Exception as error:
        return Finding(part, name, "fail", f"{type(error).__name__}: {first_line(error)}")


def summary(settings: Settings, findings: list[Finding]) -> dict[str, Any]:
    """The JSON file: machine, verdict, every finding."""
    failed = [finding for finding in findings if finding.status == "fail"]
    return {
        "format": 1,
        "verdict": "FAIL" if failed else "PASS",
        "device": str(settings.device),
        "gpu": torch.cuda.get_device_name(settings.device) if settings.on_gpu else None,
        "machine": platform.platform(),
        "torch": torch.__version__,
        "quick": settings.quick,
        "findings": [asdict(finding) for finding in findings],
    }
