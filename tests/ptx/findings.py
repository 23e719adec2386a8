"""What goes wrong in an emulated launch: errors that end it, and findings that are collected."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


class PtxError(Exception):
    """Code that the emulator cannot run."""


@dataclass
class Report:
    """Findings, counted by kind and line of PTX; of each, the first one in words."""

    counts: Counter[tuple[str, int]] = field(default_factory=Counter)
    first: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict)

    def add(self, kind: str, line: int, source: str, detail: str = "") -> None:
        self.counts[kind, line] += 1
        self.first.setdefault((kind, line), (source, detail))

    def merge(self, other: Report, kernel: str) -> None:
        for (kind, line), count in other.counts.items():
            key = (f"{kernel} {kind}", line)
            self.counts[key] += count
            self.first.setdefault(key, other.first[kind, line])

    def lines(self) -> list[str]:
        out = []
        for (kind, line), count in self.counts.items():
            source, detail = self.first[kind, line]
            out.append(f"{kind}: ptx line {line} ({source}) x{count}: {detail}")
        return out
