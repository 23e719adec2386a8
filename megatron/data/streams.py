"""Opening text: plain or compressed files, and the members of archives."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import zstandard
from tqdm import tqdm

from megatron.errors import DataError
from megatron.terminal import require

TEXT_SUFFIXES = frozenset(
    {".txt", ".text", ".raw", ".md", ".rst", ".tex", ".html", ".htm", ".xml", ".css", ".csv"}
    | {".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go", ".rs"}
    | {".rb", ".pl", ".sh", ".sql", ".r", ".jl", ".scala", ".hs", ".lua", ".swift", ".kt"}
)
JSON_SUFFIXES = frozenset({".jsonl", ".json", ".ndjson"})
PARQUET = ".parquet"
ARCHIVE_SUFFIXES = frozenset({".tar", ".tgz", ".zip"})
READ_SIZE = 1 << 20
SNIFFED = 4096  # bytes at the start of a file of no known kind
PARQUET_ROWS = 1000
ZSTD_SLICE = 2048
MAX_ZSTD_WINDOW = 1 << 27  # what the zstd command accepts without --long
DECODING_ERRORS = (
    EOFError,
    OSError,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    zstandard.ZstdError,
)


_DECOMPRESSORS: dict[str, Callable[[BinaryIO], Any]] = {
    ".zst": lambda raw: io.BufferedReader(_BlockReader(_zstd_blocks(raw)), READ_SIZE),
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".tgz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".lzma": lzma.LZMAFile,
}


@dataclass(frozen=True)
class TextFile:
    """A readable stream of text: its name for messages, whether it is JSON lines, its bytes."""

    name: str
    is_json: bool
    stream: BinaryIO


def plain_suffix(name: str) -> str:
    """The suffix below any compression: ``.jsonl`` for ``a.jsonl.zst``."""
    path = Path(name)
    compressed = path.suffix.lower() in _DECOMPRESSORS.keys() - ARCHIVE_SUFFIXES
    return (path.with_suffix("") if compressed else path).suffix.lower()


def list_files(paths: list[Path]) -> tuple[list[Path], list[Path]]:
    """Input files in a fixed order, and the files of folders that are of no known kind."""
    known: list[Path] = []
    unknown: list[Path] = []
    readable = TEXT_SUFFIXES | JSON_SUFFIXES | ARCHIVE_SUFFIXES | {PARQUET}
    for path in paths:
        if path.is_dir():
            for file in sorted(p for p in path.rglob("*") if p.is_file()):
                if any(part.startswith(".") for part in file.relative_to(path).parts):
                    continue
                (known if plain_suffix(file.name) in readable else unknown).append(file)
        elif path.is_file():
            known.append(path)
        else:
            raise DataError(f"{path}: no such file or folder")
    if not known:
        listed = ", ".join(str(path) for path in paths)
        raise DataError(
            f"{listed}: no text found; expected .jsonl, .jsonl.zst, .parquet, .txt, an archive of "
            "them, or a folder of any"
        )
    return known, unknown


@contextmanager
def open_members(path: Path, raw: BinaryIO) -> Iterator[Iterator[TextFile]]:
    """The text files in ``raw``, which is the open file ``path``: itself, or an archive's members.

    Damage in a compressed stream, seen at any time while reading, is a DataError naming the file.
    """
    try:
        yield _members(path, raw)
    except DECODING_ERRORS as error:
        raise DataError(f"{path}: damaged or truncated ({error})") from error


def _members(path: Path, raw: BinaryIO) -> Iterator[TextFile]:
    suffix = plain_suffix(path.name)
    if suffix == ".zip":
        members = zip_members(raw)
    elif suffix in ARCHIVE_SUFFIXES:
        members = tar_members(decompressed(path.name, raw))
    elif suffix == PARQUET:
        lines = io.BufferedReader(_BlockReader(parquet_lines(path, raw)), READ_SIZE)
        yield TextFile(str(path), True, cast(BinaryIO, lines))
        return
    else:
        yield _text_file(str(path), raw)
        return
    for name, stream in members:
        yield _text_file(f"{path}:{name}", stream)


def _text_file(name: str, raw: BinaryIO) -> TextFile:
    stream = decompressed(name, raw)
    if plain_suffix(name) not in TEXT_SUFFIXES | JSON_SUFFIXES:
        buffered = io.BufferedReader(cast(Any, stream), READ_SIZE)
        if b"\0" in buffered.peek(SNIFFED)[:SNIFFED] or buffered.peek(5)[:5] == b"%PDF-":
            raise DataError(
                f"{name}: is not text (a binary file); give .txt, .jsonl, .jsonl.zst or .parquet"
            )
        stream = cast(BinaryIO, buffered)
    return TextFile(name, plain_suffix(name) in JSON_SUFFIXES, stream)


def parquet_lines(path: Path, raw: BinaryIO) -> Iterator[bytes]:
    """The rows of a parquet file as JSON lines, a batch at a time."""
    parquet: Any = require("pyarrow.parquet", f"{path}: reading parquet")
    pyarrow: Any = require("pyarrow", "parquet")
    try:
        for batch in parquet.ParquetFile(raw).iter_batches(batch_size=PARQUET_ROWS):
            rows = (json.dumps(row, default=str, ensure_ascii=False) for row in batch.to_pylist())
            yield "".join(f"{row}\n" for row in rows).encode("utf-8", "replace")
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: cannot be read as parquet ({error!s:.200})") from error


def tar_members(stream: BinaryIO) -> Iterator[tuple[str, BinaryIO]]:
    """Files with their names; "r|" reads strictly forward, so that nothing is unpacked to disk."""
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            if member.isfile():
                handle = archive.extractfile(member)
                assert handle is not None
                yield member.name, cast(BinaryIO, handle)


def zip_members(raw: BinaryIO) -> Iterator[tuple[str, BinaryIO]]:
    with zipfile.ZipFile(raw) as archive:
        for info in sorted(archive.infolist(), key=lambda i: i.filename):
            if not info.is_dir():
                with archive.open(info) as handle:  # its own `readline` is slow
                    yield info.filename, cast(BinaryIO, io.BufferedReader(handle, READ_SIZE))


def decompressed(name: str, raw: BinaryIO) -> BinaryIO:
    """The stream, decompressed by the suffix of ``name``."""
    unpack = _DECOMPRESSORS.get(Path(name).suffix.lower())
    return raw if unpack is None else cast(BinaryIO, unpack(raw))


def _zstd_blocks(raw: BinaryIO) -> Iterator[bytes]:
    """Frames of zstd one after another; the library's own reader takes a cut frame for the end.

    A few bytes of zstd can stand for 128 KiB each. Small slices go in, so that what comes out of
    one is at most some tens of megabytes, whatever the file claims.
    """
    context = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW)
    frame, ended = context.decompressobj(), True
    while compressed := raw.read(ZSTD_SLICE):
        while compressed:
            yield frame.decompress(compressed)
            compressed, ended = frame.unused_data, frame.eof
            if ended:
                frame = context.decompressobj()
    if not ended:
        raise EOFError("the last zstd frame is incomplete")


class _BlockReader(io.RawIOBase):
    """A stream of blocks that are made as they are read."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = filter(None, blocks)
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        self._ready = self._ready or memoryview(next(self._blocks, b""))
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def progress_in_bytes(total: int | None, title: str, shown: bool, done: int = 0) -> tqdm[Any]:
    """A progress bar, on a terminal only."""
    hidden = None if shown else True
    return tqdm(total=total, initial=done, unit="B", unit_scale=True, desc=title, disable=hidden)
