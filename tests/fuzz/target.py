"""One kind of file to spoil, and who reads it afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Target:
    """Files of one kind and their reader."""

    folder: Path
    files: list[Path]
    read: Callable[[Path], object]
    """Gets the spoilt file; what it returns is the content that was understood."""
    text: bool = False
    mend: Callable[[Path], None] | None = None
    """Makes checksums right again after a file was spoilt, as a forger would."""
    must_be_honest: bool = False
    """Whether a file that is accepted must give the honest content, unless its sums were mended."""
    spoil: Callable[[Path, random.Random], None] | None = None
    """Makes the spoilt file, where changing bytes of the honest one would not."""
    honest: dict[Path, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.honest = {path: path.read_bytes() for path in self.files}
