"""Result files: what was measured, kept so that nothing need be measured twice.

    <prefix>_<task>.json                     the newest result of a task
    <prefix folder>/cache/<task>-<key>.json  every finished result, by what it depends on
    <prefix folder>/cache/<task>-<key>.part  the cells of an unfinished one

The key is a hash of the checkpoint's files, the model and the task's parameters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.atomic_files import atomic_writer
from megatron.errors import EvaluationError
from megatron.mpu.ranks import Ranks

__all__ = ["FORMAT", "Cells", "ResultStore", "number", "text_table"]

FORMAT = 1
Content = dict[str, Any]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Complete or not at all; in the order given, and without NaN, which is not JSON."""
    with atomic_writer(path) as handle:
        handle.write((json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Content | None:
    """The content of a file; None if it is absent or not ours."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


class Cells:
    """The parts of one task's result, each written as soon as it is known."""

    def __init__(self, path: Path, key: str, ranks: Ranks) -> None:
        self._path, self._key, self._ranks = path, key, ranks
        saved = read_json(path) if ranks.is_main else None
        found = saved["cells"] if saved and saved.get("key") == key else {}
        self._cells: dict[str, Any] = ranks.broadcast(found)
        self.resumed = len(self._cells)
        self.errors: list[dict[str, Any]] = []

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        """The named part, computed unless an interrupted run already did."""
        if name not in self._cells:
            self._cells[name] = compute()
            if self._ranks.is_main:
                write_json(self._path, {"key": self._key, "cells": self._cells})
        return self._cells[name]

    def attempt(self, name: str, compute: Callable[[], Any], **where: Any) -> Any | None:
        """Like `get`, but what cannot be done is noted as an error and the rest goes on."""
        try:
            return self.get(name, compute)
        except ValueError as error:
            self.errors.append({**where, "error": str(error)})
            return None

    def discard(self) -> None:
        """The result is complete and kept elsewhere."""
        if self._ranks.is_main:
            self._path.unlink(missing_ok=True)


class ResultStore:
    """The result files of one checkpoint under one prefix."""

    def __init__(self, prefix: Path, ranks: Ranks) -> None:
        self._prefix, self._ranks = prefix, ranks
        self.cache_folder = prefix.parent / "cache"
        if ranks.is_main:
            try:
                self.cache_folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise EvaluationError(
                    f"eval_results_prefix {prefix}: cannot write there ({error}); "
                    "set eval_results_prefix to another place"
                ) from error

    def path(self, name: str) -> Path:
        """Where the newest result of a task is."""
        return self._prefix.with_name(f"{self._prefix.name}_{name}.json")

    def finished(self, name: str, key: str) -> Content | None:
        """An earlier result for the very same question."""
        kept = read_json(self._cached(name, key)) if self._ranks.is_main else None
        return self._ranks.broadcast(kept)

    def cells(self, name: str, key: str) -> Cells:
        return Cells(self._cached(name, key).with_suffix(".part"), key, self._ranks)

    def publish(self, name: str, key: str, content: Mapping[str, Any]) -> Path:
        """Write a finished result under its key and as the newest one."""
        path = self.path(name)
        if self._ranks.is_main:
            write_json(self._cached(name, key), dict(content))
            if read_json(path) != content:
                write_json(path, dict(content))
        return path

    def _cached(self, name: str, key: str) -> Path:
        safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)
        return self.cache_folder / f"{safe}-{key}.json"


# Text tables.


def number(value: float | None, digits: int = 4) -> str:
    """A number at fixed precision; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned to the right, under a line."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [header, *rows]
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
