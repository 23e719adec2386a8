"""Text in every kind of file: the same documents, in order; damaged, or made to fill the memory."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
import zstandard

from megatron.data.chunks import read_chunks
from megatron.errors import DataError, MissingPackageError
from tests.data.samples import TEXTS, documents, ended, jsonl, run

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
    texts = [os.urandom(100_000).hex().encode() + b"\n" for _ in range(3)]
    path = tmp_path / "a.txt.zst"
    path.write_bytes(b"".join(zstandard.compress(text) for text in texts))
    read = b"".join(part for chunk in read_chunks([path]) for part in chunk.parts)
    assert read == b"".join(texts)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match="incomplete"):
        list(read_chunks([path]))


def tar_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def zip_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


ZST = zstandard.ZstdCompressor().compress


FILES = {
    "a.jsonl": jsonl(TEXTS),
    "a.jsonl.zst": ZST(jsonl(TEXTS)),
    "two_frames.jsonl.zst": ZST(jsonl(TEXTS[:1])) + ZST(jsonl(TEXTS[1:])),
    "a.jsonl.gz": gzip.compress(jsonl(TEXTS)),
    "no_last_newline.jsonl": jsonl(TEXTS)[:-1],
    "a.jsonl.zst.tar": tar_of(
        {"x/1.jsonl.zst": ZST(jsonl(TEXTS[:2])), "2.jsonl": jsonl(TEXTS[2:])}
    ),
    "a.tar.gz": gzip.compress(tar_of({f"{i}.md": t.encode() for i, t in enumerate(TEXTS)})),
    "a.zip": zip_of({f"{i}.txt": t.encode() for i, t in enumerate(TEXTS)}),
}


@pytest.mark.parametrize("name", FILES)
def test_every_format_gives_the_same_documents(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    outcome = run([tmp_path / name], tmp_path / "out")
    assert documents(tmp_path / "out_text_document") == ended(TEXTS)
    assert (outcome.documents, outcome.broken_lines) == (3, 0)


def test_a_folder_is_read_in_order_and_other_files_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "corpus"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "2.txt").write_text("two")
    (folder / "a.jsonl").write_bytes(jsonl(["one"]))
    (folder / "c.md").write_text("three")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / ".hidden.txt").write_text("hidden")
    run([folder], tmp_path / "out")
    assert documents(tmp_path / "out_text_document") == ended(["one", "two", "three"])
    assert "1 files" in caplog.text and ".png" in caplog.text


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.jsonl.gz", "a.tar.gz", "a.zip"])
def test_truncated_archives_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name][:-10])
    with pytest.raises(DataError, match=f"{name}.*(damaged|truncated)"):
        run([tmp_path / name], tmp_path / "out")
    assert not (tmp_path / "out_text_document.idx").exists()


def test_parquet_rows_are_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"n": [1, 2, 3], "text": TEXTS}), file)
    outcome = run([file], tmp_path / "out")
    assert documents(tmp_path / "out_text_document") == ended(TEXTS)
    assert (outcome.documents, outcome.broken_lines) == (3, 0)
    file.write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as parquet"):
        run([file], tmp_path / "out")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingPackageError, match=r"needs pyarrow.*requirements-parquet\.txt"):
        run([file], tmp_path / "out")


@pytest.mark.parametrize("content", [b"%PDF-1.7 text", b"\x7fELF\0\0", b"\0" * 9])
def test_binary_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "book.pdf").write_bytes(content)
    with pytest.raises(DataError, match=r"book\.pdf: is not text"):
        run([tmp_path / "book.pdf"], tmp_path / "out")
    (tmp_path / "notes").write_text("plain words")
    run([tmp_path / "notes"], tmp_path / "out")
    assert documents(tmp_path / "out_text_document") == ended(["plain words"])


def test_an_empty_zstd_file_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt.zst").write_bytes(b"")
    chunks = read_chunks([tmp_path / "a.txt.zst"])
    assert [part for chunk in chunks for part in chunk.parts if part] == []
