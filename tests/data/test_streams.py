"""Files that are damaged, or made to fill the memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zstandard

from megatron.errors import DataError

BOMB = """
import resource, sys
from pathlib import Path
from megatron.data.chunks import read_chunks
path = Path(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
total = sum(len(part) for chunk in read_chunks([path]) for part in chunk.parts)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(total, peak - before)
"""


def test_a_zstd_bomb_streams_in_bounded_memory(tmp_path: Path) -> None:
    size, block = 1 << 30, b"a" * (1 << 22)
    path = tmp_path / "bomb.txt.zst"
    writer = zstandard.ZstdCompressor(level=19).compressobj()
    with path.open("wb") as file:
        for _ in range(size // len(block)):
            file.write(writer.compress(block))
        file.write(writer.flush())
    assert path.stat().st_size < 300_000
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", BOMB, str(path)], capture_output=True, text=True, check=True
    )
    total, kilobytes = map(int, done.stdout.split())
    assert total == size
    assert kilobytes < 200_000
    assert time.monotonic() - start < 60


def test_frames_follow_each_other_and_a_cut_one_is_named(tmp_path: Path) -> None:
    from megatron.data.chunks import read_chunks

    texts = [os.urandom(100_000).hex().encode() + b"\n" for _ in range(3)]
    path = tmp_path / "a.txt.zst"
    path.write_bytes(b"".join(zstandard.compress(text) for text in texts))
    read = b"".join(part for chunk in read_chunks([path]) for part in chunk.parts)
    assert read == b"".join(texts)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match="incomplete"):
        list(read_chunks([path]))
