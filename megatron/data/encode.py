"""The work of one process: chunks of text in, packed tokens out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron.data.chunks import Chunk, Problem
from megatron.tokenizer import Tokenizer

__all__ = ["EncodedChunk", "Encoder"]

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
