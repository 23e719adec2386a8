"""Folders of recorded files that are kept as one archive each, unpacked once a process."""

from __future__ import annotations

import atexit
import functools
import shutil
import tarfile
import tempfile
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"


@functools.cache
def unpacked(name: str) -> Path:
    """The folder that `tests/fixtures/NAME.tar.gz` holds; removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix=f"kerple-{name}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with tarfile.open(FIXTURES / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name
