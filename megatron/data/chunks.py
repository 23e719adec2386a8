"""Input cut into chunks of a quarter of a megabyte: the unit of work of one worker process.

Nothing here grows with the size of the input: small documents are grouped, a larger one is a chunk
of its own, and one of more than `PIECE_BYTES` is passed on in pieces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from megatron.data.streams import ARCHIVE_SUFFIXES, TextFile, open_members, plain_suffix
from megatron.errors import DataError

CHUNK_BYTES = 1 << 18
PIECE_BYTES = 8 << 20  # a document longer than this is tokenized in pieces
MAX_LINE_BYTES = 16 << 20  # a tokenizer takes about 16 bytes of memory for each of these
T = TypeVar("T")
Parts = Iterator[tuple[bytes, bool]]
"""Documents or pieces of them, and whether the document ends here."""


@dataclass
class Chunk:
    """Neighbouring JSON lines of one file, or texts.

    An empty line stands for one that is too long. Without ``ends_document`` the last text goes on
    in the next chunk; without ``starts_document`` the first text began in the one before.
    """

    file: str
    is_json: bool = False
    first_line: int = 1
    parts: list[bytes] = field(default_factory=list)
    starts_document: bool = True
    ends_document: bool = True
    consumed: int = 0  # bytes of the input files read so far, for the progress bar


def read_chunks(files: Iterable[Path], splitter: str = "file") -> Iterator[Chunk]:
    """Chunks of all files, in order. ``splitter`` names how plain text becomes documents."""
    finished = 0
    for path in files:
        with path.open("rb") as handle, open_members(path, handle) as members:
            for chunk in _grouped(members, DOCUMENT_SPLITTERS[splitter]):
                if plain_suffix(path.name) not in ARCHIVE_SUFFIXES:
                    _refuse_nul(chunk)
                chunk.consumed = finished + handle.tell()
                yield chunk
        finished += path.stat().st_size


def _refuse_nul(chunk: Chunk) -> None:
    """A NUL byte is in no text: the file is binary or UTF-16. In JSON its line is refused anyway.

    Texts in archives are taken as they are: public corpora have padded ones.
    """
    if not chunk.is_json and any(b"\0" in part for part in chunk.parts):
        raise DataError(
            f"{chunk.file}: has a NUL byte, so it is not text but binary or UTF-16; leave it out, "
            "or convert it (iconv -f UTF-16 -t UTF-8)"
        )


def _grouped(members: Iterator[TextFile], split: Callable[[BinaryIO], Parts]) -> Iterator[Chunk]:
    """Small neighbours share a chunk, so that an archive of tiny files is not slow."""
    chunk: Chunk | None = None
    size, ended = 0, True
    for member in members:
        if member.is_json:
            if chunk:
                yield chunk
                chunk = None
            yield from _json_chunks(member)
            continue
        for part, ends in split(member.stream):
            if chunk is None:
                chunk, size = Chunk(member.name, starts_document=ended), 0
            chunk.parts.append(part)
            chunk.ends_document = ends
            size, ended = size + len(part), ends
            if size >= CHUNK_BYTES or not ends:
                yield chunk
                chunk = None
    if chunk:
        yield chunk


def _json_chunks(member: TextFile) -> Iterator[Chunk]:
    """Each line is a document, and none of them too long to be one."""
    number = 1
    while block := member.stream.read(CHUNK_BYTES):  # line by line it would be much slower
        rest = b"" if block.endswith(b"\n") else member.stream.readline(MAX_LINE_BYTES)
        lines = BytesIO(block + rest).readlines()
        if len(rest) == MAX_LINE_BYTES and not rest.endswith(b"\n"):
            lines[-1] = b""
            while rest and not rest.endswith(b"\n"):
                rest = member.stream.readline(PIECE_BYTES)
        yield Chunk(member.name, True, number, lines)
        number += len(lines)


def read_texts(
    files: Sequence[Path], key: str = "text", megabytes: float | None = None
) -> Iterator[str]:
    """Texts of all documents, until the limit; broken lines are skipped."""
    left = float("inf") if megabytes is None else megabytes * 1e6
    for chunk in read_chunks(files):
        for part in chunk.parts:
            if left <= 0:
                return
            text = _text_of_line(part, key) if chunk.is_json else part.decode("utf-8", "replace")
            if text:
                left -= len(text)
                yield text


def _text_of_line(line: bytes, key: str) -> str:
    try:
        texts = texts_of_line(line, [key])
    except (ValueError, RecursionError):
        texts = None
    return "".join(texts or []).encode("utf-8", "replace").decode()


def texts_of_line(
    line: bytes, keys: Sequence[str], where: Sequence[tuple[str, str]] = ()
) -> list[str] | None:
    """The texts of a JSON line; None if ``where`` does not select it."""
    return values_of_line(line, keys, where, str, "a string")


def values_of_line(
    line: bytes, keys: Sequence[str], where: Sequence[tuple[str, str]], kind: type[T], what: str
) -> list[T] | None:
    """The values of a JSON line's keys, each a ``kind``; None if ``where`` does not select it."""
    if not line:
        raise ValueError(f"line longer than {MAX_LINE_BYTES >> 20} MB")
    try:
        record = json.loads(line.removesuffix(b"\n"))
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object was expected, not {type(record).__name__}")
    if any(_value_at(record, path) != value for path, value in where):
        return None
    for key in keys:
        if not isinstance(record.get(key), kind):
            raise ValueError(
                f'key "{key}" ' + (f"is not {what}" if key in record else "is missing")
            )
    return [record[key] for key in keys]


def _value_at(record: Any, path: str) -> str | None:
    """The value at a dotted path such as ``meta.pile_set_name``, as text."""
    for key in path.split("."):
        record = record.get(key) if isinstance(record, dict) else None
    return None if record is None else str(record)


def _whole_file(stream: BinaryIO) -> Parts:
    """The file is one document."""
    held = b""
    while block := stream.read(PIECE_BYTES):
        held += block
        while len(held) > PIECE_BYTES:
            cut = _safe_cut(held)
            yield held[:cut], False
            held = held[cut:]
    yield held, True


def _safe_cut(text: bytes) -> int:
    """Before the last line end that follows a letter or digit: no tokenizer's word crosses it."""
    position = len(text)
    while (position := text.rfind(b"\n", 1, position)) > 0:
        if text[position - 1 : position].isalnum():
            return position
    cut = len(text) // 2
    # Not inside a UTF-8 character; something must be left, to end the document with.
    while cut < len(text) - 1 and text[cut] & 0xC0 == 0x80:
        cut += 1
    return cut


def _starts_page(line: bytes) -> bool:
    """enwik8: one document for each page of the dump."""
    return line.strip() == b"<page>"


def _starts_article(line: bytes) -> bool:
    """WikiText: an article begins with its title, `` = Title = ``; sections have more signs."""
    return line.startswith(b" = ") and line.rstrip().endswith(b" =") and b" = = " not in line


def _split_before(starts: Callable[[bytes], bool]) -> Callable[[BinaryIO], Parts]:
    """Documents begin at lines that ``starts`` accepts; very long ones come in pieces."""

    def split(stream: BinaryIO) -> Parts:
        lines: list[bytes] = []
        size = 0
        while line := stream.readline(PIECE_BYTES):
            begins = starts(line)
            if lines and (begins or size > PIECE_BYTES):
                yield b"".join(lines), begins
                lines, size = [], 0
            lines.append(line)
            size += len(line)
        if lines:
            yield b"".join(lines), True

    return split


DOCUMENT_SPLITTERS: dict[str, Callable[[BinaryIO], Parts]] = {
    "file": _whole_file,
    "line": _split_before(lambda line: True),
    "wiki_pages": _split_before(_starts_page),
    "wikitext_articles": _split_before(_starts_article),
}
