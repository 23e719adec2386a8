"""Files that are damaged, or made to fill the memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zstandard

from megatron.data import IndexedDataset, IndexedDatasetWriter
from megatron.data.indexed_dataset import idx_path
from megatron.data.preprocess import PreprocessOptions, preprocess
from megatron.errors import DataError
from megatron.tokenizer import build_tokenizer

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


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A dataset with its manifest."""
    text = tmp_path / "in.txt"
    text.write_text("\n".join(f"line {n} of the text" for n in range(200)))
    options = PreprocessOptions(keys=["text"], workers=1, splitter="line", progress=False)
    outcome = preprocess([text], tmp_path / "d", build_tokenizer("CharLevelTokenizer"), options)
    return outcome.prefixes[0]


def test_every_flipped_bit_of_an_index_is_seen(prepared: Path) -> None:
    IndexedDataset(prepared)
    path = idx_path(prepared)
    good = path.read_bytes()
    generator = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(good)
        damaged[generator.integers(len(good))] ^= 1 << int(generator.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"\.idx: does not match the checksum"):
            IndexedDataset(prepared)


def test_the_tokens_are_verified_on_request(prepared: Path) -> None:
    path = prepared.with_name(prepared.name + ".bin")
    damaged = bytearray(path.read_bytes())
    damaged[100] ^= 1
    path.write_bytes(damaged)
    IndexedDataset(prepared)  # opening does not read the tokens
    with pytest.raises(DataError, match=r"\.bin: does not match the checksum"):
        IndexedDataset(prepared, warmup=True)


@pytest.mark.parametrize("kind", ["bin", "idx"])
@pytest.mark.parametrize("change", [-8, 2])
def test_a_file_of_another_size_than_recorded_is_damaged(
    prepared: Path, kind: str, change: int
) -> None:
    path = prepared.with_name(f"{prepared.name}.{kind}")
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content[:50] + b"xx" + content[50:])
    with pytest.raises(DataError, match=rf"\.{kind}: \d+ bytes, but .*\.json recorded \d+"):
        IndexedDataset(prepared)


def test_data_written_anew_is_not_measured_by_an_older_manifest(prepared: Path) -> None:
    with IndexedDatasetWriter(prepared) as writer:
        writer.add_document([1, 2, 3])
    assert IndexedDataset(prepared, warmup=True)[0].tolist() == [1, 2, 3]


def test_what_a_killed_preprocessing_left_is_removed_by_the_next(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = tmp_path / f".d.bin.{gone.pid}.0123abcd.tmp"
    left.write_bytes(b"x" * 100)
    recent = tmp_path / f".d.bin.{gone.pid}.89abcdef.tmp"
    recent.write_bytes(b"x")
    living = tmp_path / f".d.bin.{os.getpid()}.01234567.tmp"
    living.write_bytes(b"x")
    other = tmp_path / f".e.bin.{gone.pid}.0123abcd.tmp"
    other.write_bytes(b"x")
    for path in (left, living, other):
        os.utime(path, (0, 0))
    with IndexedDatasetWriter(tmp_path / "d") as writer:
        writer.add_document([1, 2])
    assert not left.exists()
    assert recent.exists()
    assert living.exists()
    assert other.exists()
