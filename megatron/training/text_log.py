"""`log_dir`: what a rank prints, kept in a file of its own too."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


class _Tee:
    """Writes to the terminal and to the file; everything else is the terminal's."""

    def __init__(self, terminal: Any, file: IO[str]) -> None:
        self._terminal, self._file = terminal, file

    def write(self, text: str) -> int:
        self._file.write(text)
        self._file.flush()
        return int(self._terminal.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)


@contextlib.contextmanager
def text_log(directory: str | None) -> Iterator[None]:
    """Copy stdout and stderr of this rank to `directory`/rank_00000.log while the block runs."""
    if directory is None:
        yield
        return
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        (folder / f"rank_{rank:05d}.log").open("a", encoding="utf-8") as file,
        contextlib.redirect_stdout(_Tee(sys.stdout, file)),
        contextlib.redirect_stderr(_Tee(sys.stderr, file)),
    ):
        yield
