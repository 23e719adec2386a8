"""Input cut into chunks of a quarter of a megabyte: the unit of work of one worker process.

Nothing here grows with the size of the input: JSON lines are cut at line ends, small documents are
grouped, and a document longer than a chunk is passed on in pieces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from megatron.data.streams import TextFile, open_members
from megatron.tokenizer import Tokenizer

CHUNK_BYTES = 1 << 18
PIECE_BYTES = 8 << 20  # a document longer than this is tokenized in pieces
MAX_LINE_BYTES = 256 << 20
Splitter = Callable[[BinaryIO], Iterator[tuple[bytes, bool]]]


@dataclass(frozen=True)
class Problem:
    """A place in the input that could not be used, and why."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclass
class Chunk:
    """JSON lines, whole texts, or one piece of a long text.

    ``ends_document`` matters for a piece only: whether it is the last one.
    """

    kind: Literal["lines", "texts", "piece"]
    file: str
    first_line: int = 1
    parts: list[bytes] = field(default_factory=list)
    ends_document: bool = True
    problems: list[Problem] = field(default_factory=list)
    consumed: int = 0  # bytes of the input files read so far, for the progress bar


class _CountingFile:
    """A file that knows how many bytes were read from it, seeks included."""

    def __init__(self, handle: BinaryIO) -> None:
        self._handle = handle
        self.count = 0

    def read(self, size: int = -1) -> bytes:
        data = self._handle.read(size)
        self.count += len(data)
        return data

    def __getattr__(self, name: str) -> object:
        return getattr(self._handle, name)


def read_chunks(files: Iterable[Path], splitter: str = "file") -> Iterator[Chunk]:
    """Chunks of all files, in order. ``splitter`` names how plain text becomes documents."""
    split = DOCUMENT_SPLITTERS[splitter]
    finished = 0
    for path in files:
        with path.open("rb") as handle:
            counting = _CountingFile(handle)
            with open_members(path, counting) as members:  # type: ignore[arg-type]
                for chunk in _grouped(_member_chunks(members, split)):
                    chunk.consumed = finished + counting.count
                    yield chunk
            finished += path.stat().st_size


def read_texts(
    files: Sequence[Path], key: str = "text", megabytes: float | None = None
) -> Iterator[str]:
    """Texts of all documents, until the limit; broken lines are simply no part of them."""
    left = float("inf") if megabytes is None else megabytes * 1e6
    for chunk in read_chunks(files):
        parts = b"".join(chunk.parts).split(b"\n") if chunk.kind == "lines" else chunk.parts
        for part in parts:
            if left <= 0:
                return
            text = (
                _json_text(part, key) if chunk.kind == "lines" else part.decode("utf-8", "replace")
            )
            if text:
                left -= len(text)
                yield text


def _json_text(line: bytes, key: str) -> str:
    try:
        value = json.loads(line)[key]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def _member_chunks(members: Iterator[TextFile], split: Splitter) -> Iterator[Chunk]:
    for member in members:
        if member.is_json:
            yield from _line_chunks(member)
        else:
            yield from _text_chunks(member, split)


def _grouped(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """Join small neighbouring texts, so that a folder of tiny files is not slow."""
    group: Chunk | None = None
    size = 0
    for chunk in chunks:
        if group is not None and (chunk.kind != "texts" or size >= CHUNK_BYTES):
            yield group
            group = None
        if chunk.kind != "texts":
            yield chunk
        elif group is None:
            group, size = chunk, sum(map(len, chunk.parts))
        else:
            group.parts += chunk.parts
            size += sum(map(len, chunk.parts))
    if group is not None:
        yield group


def _line_chunks(member: TextFile) -> Iterator[Chunk]:
    """Blocks of whole lines. A line too long to be one document is skipped and reported."""
    rest: list[bytes] = []  # the beginning of a line whose end has not been read yet
    line, held, skipping = 1, 0, False
    while block := member.stream.read(CHUNK_BYTES):
        cut = block.rfind(b"\n") + 1
        if not cut:
            held += len(block)
            if held > MAX_LINE_BYTES:
                rest, skipping = [], True
            if not skipping:
                rest.append(block)
            continue
        if skipping:
            end = block.find(b"\n") + 1
            problem = Problem(member.name, line, f"line longer than {MAX_LINE_BYTES >> 20} MB")
            yield Chunk("lines", member.name, line, [], problems=[problem])
            data, line, skipping = block[end:cut], line + 1, False
        else:
            data = b"".join([*rest, block[:cut]])
        if data:
            yield Chunk("lines", member.name, line, [data])
            line += data.count(b"\n")
        rest, held = ([block[cut:]], len(block) - cut) if cut < len(block) else ([], 0)
    if skipping:
        problem = Problem(member.name, line, f"line longer than {MAX_LINE_BYTES >> 20} MB")
        yield Chunk("lines", member.name, line, [], problems=[problem])
    elif rest:
        yield Chunk("lines", member.name, line, [b"".join(rest)])


def _text_chunks(member: TextFile, split: Splitter) -> Iterator[Chunk]:
    in_pieces = False
    for text, ends in split(member.stream):
        if ends and not in_pieces:
            yield Chunk("texts", member.name, parts=[text])
        else:
            yield Chunk("piece", member.name, parts=[text], ends_document=ends)
        in_pieces = not ends


def _whole_file(stream: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """The file is one document; (bytes, whether the document ends here)."""
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
    while cut < len(text) and text[cut] & 0xC0 == 0x80:  # not inside a UTF-8 character
        cut += 1
    return cut


def _every_line(stream: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    yield from _split_before(stream, lambda line: True)


def _wiki_pages(stream: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """enwik8: one document for each page of the dump."""
    yield from _split_before(stream, lambda line: line.strip() == b"<page>")


def _wikitext_articles(stream: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """WikiText: an article begins with its title, `` = Title = ``; sections have more signs."""

    def is_title(line: bytes) -> bool:
        return line.startswith(b" = ") and line.rstrip().endswith(b" =") and b" = = " not in line

    yield from _split_before(stream, is_title)


def _split_before(
    stream: BinaryIO, starts: Callable[[bytes], bool]
) -> Iterator[tuple[bytes, bool]]:
    """Documents begin at lines that ``starts`` accepts; very long ones come in pieces."""
    lines: list[bytes] = []
    size = 0
    while line := stream.readline(PIECE_BYTES):
        if lines and starts(line):
            yield b"".join(lines), True
            lines, size = [], 0
        elif size > PIECE_BYTES:
            yield b"".join(lines), False
            lines, size = [], 0
        lines.append(line)
        size += len(line)
    if lines:
        yield b"".join(lines), True


DOCUMENT_SPLITTERS: dict[str, Splitter] = {
    "file": _whole_file,
    "line": _every_line,
    "wiki_pages": _wiki_pages,
    "wikitext_articles": _wikitext_articles,
}


# The work of one process: chunks of text in, packed tokens out.

MAX_PROBLEMS_PER_CHUNK = 20


@dataclass
class EncodedChunk:
    """Tokens of each key, packed; with ``piece`` they belong to a document still open."""

    data: list[bytes]
    sizes: list[list[int]]
    piece: bool = False
    ends_document: bool = True
    text_characters: int = 0
    empty: int = 0
    left_out: int = 0
    broken: int = 0
    problems: list[Problem] = field(default_factory=list)
    consumed: int = 0


class Encoder:
    """Turns chunks into tokens; one lives in every worker process."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        keys: Sequence[str],
        dtype: np.dtype[Any],
        *,
        append_eod: bool,
        ftfy: bool,
        where: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._keys = list(keys)
        self._dtype = dtype
        self._eod = [tokenizer.eod] if append_eod else []
        self._fix = _load_ftfy() if ftfy else None
        self._where = [(key.split("."), value) for key, value in where]

    def encode(self, chunk: Chunk) -> EncodedChunk:
        result = EncodedChunk([], [], consumed=chunk.consumed)
        result.problems += chunk.problems
        result.broken = len(chunk.problems)
        if chunk.kind == "piece":
            return self._encode_piece(chunk, result)
        if chunk.kind == "lines":
            columns = self._read_lines(chunk, result)
        else:
            texts = [part.decode("utf-8", "replace") for part in chunk.parts]
            kept = [text for text in texts if text]
            result.empty += len(texts) - len(kept)
            columns = [kept for _ in self._keys]
        for texts in columns:
            result.text_characters += sum(len(text) for text in texts)
            ids = self._tokenize(texts)
            result.sizes.append([len(tokens) for tokens in ids])
            result.data.append(self._pack(ids))
        return result

    def _encode_piece(self, chunk: Chunk, result: EncodedChunk) -> EncodedChunk:
        text = b"".join(chunk.parts).decode("utf-8", "replace")
        result.piece, result.ends_document = True, chunk.ends_document
        result.text_characters = len(text)
        ids = self._tokenizer.tokenize_batch([self._fix(text) if self._fix else text])[0]
        packed = self._pack([ids + self._eod if chunk.ends_document else ids])
        result.data = [packed for _ in self._keys]
        result.sizes = [[] for _ in self._keys]
        return result

    def _read_lines(self, chunk: Chunk, result: EncodedChunk) -> list[list[str]]:
        """The text of every key of every line; broken lines are noted, never fatal here."""
        columns: list[list[str]] = [[] for _ in self._keys]
        lines = b"".join(chunk.parts).split(b"\n")
        for number, line in enumerate(lines, start=chunk.first_line):
            if not line.strip():
                continue
            try:
                texts = self._parse(line)
            except (ValueError, RecursionError) as error:
                result.broken += 1
                if len(result.problems) < MAX_PROBLEMS_PER_CHUNK:
                    result.problems.append(Problem(chunk.file, number, str(error)))
                continue
            if texts is None:
                result.left_out += 1
                continue
            if not any(texts):
                result.empty += 1
                continue
            for column, text in zip(columns, texts, strict=True):
                column.append(text)
        return columns

    def _parse(self, line: bytes) -> list[str] | None:
        """The texts of a line; None if it is not one of those that `where` asks for."""
        try:
            record = json.loads(line)
        except UnicodeDecodeError:
            raise ValueError("not UTF-8") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
        if not isinstance(record, dict):
            raise ValueError(f"a JSON object was expected, not {type(record).__name__}")
        if any(_value_at(record, path) != value for path, value in self._where):
            return None
        texts = []
        for key in self._keys:
            if not isinstance(record.get(key), str):
                state = "is not a string" if key in record else "is missing"
                raise ValueError(f'key "{key}" {state}')
            texts.append(record[key])
        return texts

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        if self._fix:
            texts = [self._fix(text) for text in texts]
        batch = self._tokenizer.tokenize_batch(texts)
        return [tokens + self._eod for tokens in batch] if self._eod else batch

    def _pack(self, ids: list[list[int]]) -> bytes:
        if not ids:
            return b""
        arrays = [np.array(tokens, self._dtype) for tokens in ids]
        return np.concatenate(arrays).tobytes()


def _value_at(record: Any, path: Sequence[str]) -> str | None:
    """What ``meta.pile_set_name`` and the like lead to, as text."""
    for key in path:
        record = record.get(key) if isinstance(record, dict) else None
    return None if record is None else str(record)


def _load_ftfy():  # type: ignore[no-untyped-def]  # an optional package
    from megatron.errors import DataError

    try:
        import ftfy
    except ImportError:
        raise DataError("--ftfy needs the ftfy package: pip install ftfy") from None
    return ftfy.fix_text
