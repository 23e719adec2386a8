"""Text files to token files: streaming, in many processes, in bounded memory."""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from megatron.data.chat import ChatTemplate, conversations_of_line
from megatron.data.chunks import Chunk, read_chunks, texts_of_line
from megatron.data.indexed_dataset import describe_tokenizer
from megatron.data.streams import list_files, progress_in_bytes
from megatron.data.writer import IndexedDatasetWriter, best_dtype
from megatron.errors import DataError
from megatron.tokenizer import Tokenizer

log = logging.getLogger(__name__)

CHUNKS_PER_WORKER = 8  # how far reading may run ahead; bounds the memory
PROBLEMS_SHOWN = 10
MAX_PROBLEMS_PER_CHUNK, MAX_PROBLEMS = 20, 1000
PARENT_POLL_SECONDS = 2.0
Read = TypeVar("Read")


@dataclass(frozen=True)
class PreprocessOptions:
    """Options of tokenization and of the worker processes."""

    keys: tuple[str, ...] = ("text",)
    append_eod: bool = True
    ftfy: bool = False
    splitter: str = "file"
    where: tuple[tuple[str, str], ...] = ()
    """Only JSON lines with these values: (("meta.pile_set_name", "Github"),)."""
    chat: ChatTemplate | None = None
    """Lines are conversations: tokens, and labels of the assistant's turns."""
    strict: bool = False
    workers: int = 1
    progress: bool = True


@dataclass
class Tally:
    """Counts of what was read and skipped."""

    text_characters: int = 0
    empty_documents: int = 0
    left_out: int = 0
    broken_lines: int = 0
    problems: list[str] = field(default_factory=list)
    """Places in the input that could not be used, and why."""

    def add(self, other: Tally) -> None:
        self.text_characters += other.text_characters
        self.empty_documents += other.empty_documents
        self.left_out += other.left_out
        self.broken_lines += other.broken_lines
        self.problems += other.problems[: MAX_PROBLEMS - len(self.problems)]


@dataclass
class Outcome(Tally):
    """What one run read and wrote."""

    prefixes: list[Path] = field(default_factory=list)
    documents: int = 0
    tokens: int = 0
    source_hash: str = ""


@dataclass
class Encoded(Tally):
    """For each key the tokens of a chunk's documents, packed, and how many each has."""

    data: list[bytes] = field(default_factory=list)
    sizes: list[list[int]] = field(default_factory=list)
    ends_document: bool = True
    consumed: int = 0


class Encoder:
    """Turns chunks into tokens; each worker process has one."""

    def __init__(
        self, tokenizer: Tokenizer, options: PreprocessOptions, dtype: np.dtype[Any]
    ) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._dtype = dtype
        self.columns = dict.fromkeys(options.keys, dtype)
        """What is written: the name in the file's name, and the dtype."""
        if options.chat is not None:
            labels = np.dtype("<i4")  # they are -100 where there is no loss
            self.columns |= {f"{key}_label": labels for key in options.keys}
        self._fix: Callable[[str], str] | None = None
        if options.ftfy:
            from ftfy import fix_text

            self._fix = fix_text

    def encode(self, chunk: Chunk) -> Encoded:
        result = Encoded(ends_document=chunk.ends_document, consumed=chunk.consumed)
        if self._options.chat is not None:
            return self._encode_conversations(self._options.chat, chunk, result)
        read = self._read_lines if chunk.is_json else self._read_texts
        for texts in read(chunk, result):
            result.text_characters += sum(len(text) for text in texts)
            if self._fix:
                texts = [self._fix(text) for text in texts]
            ids = self._tokenizer.tokenize_batch(texts)
            if self._options.append_eod:
                self._end_documents(ids, chunk)
            result.sizes.append([len(tokens) for tokens in ids])
            result.data.append(b"".join(np.array(tokens, self._dtype).tobytes() for tokens in ids))
        return result

    def _encode_conversations(
        self, template: ChatTemplate, chunk: Chunk, result: Encoded
    ) -> Encoded:
        """For each key the tokens, then for each the labels."""
        if not chunk.is_json:
            raise DataError(f"{chunk.file}: conversations are JSON lines, this is plain text")
        keys, where = self._options.keys, self._options.where
        end = self._tokenizer.eod if self._options.append_eod else None

        def read(line: bytes) -> list[tuple[list[int], list[int], int]] | None:
            found = conversations_of_line(line, keys, where)
            if found is None:
                return None
            return [template.encode(messages, self._tokenizer, end) for messages in found]

        columns: list[list[list[int]]] = [[] for _ in self.columns]
        for encoded in self._good_lines(chunk, result, read):
            tokens, labels, characters = zip(*encoded, strict=True)
            result.text_characters += sum(characters)
            if not any(tokens):
                result.empty_documents += 1
                continue
            for column, ids in zip(columns, [*tokens, *labels], strict=True):
                column.append(ids)
        for column, dtype in zip(columns, self.columns.values(), strict=True):
            result.sizes.append([len(ids) for ids in column])
            result.data.append(b"".join(np.array(ids, dtype).tobytes() for ids in column))
        return result

    def _end_documents(self, ids: list[list[int]], chunk: Chunk) -> None:
        """As in GPT-NeoX, a text without any token (spaces, to SentencePiece) gets no end."""
        for number, tokens in enumerate(ids if chunk.ends_document else ids[:-1]):
            if tokens or (number == 0 and not chunk.starts_document):
                tokens.append(self._tokenizer.eod)

    def _read_texts(self, chunk: Chunk, result: Encoded) -> list[list[str]]:
        texts = [part.decode("utf-8", "replace") for part in chunk.parts if part]
        result.empty_documents += len(chunk.parts) - len(texts)
        return [texts for _ in self._options.keys]

    def _read_lines(self, chunk: Chunk, result: Encoded) -> list[list[str]]:
        """The text of every key of every line."""
        keys, where = self._options.keys, self._options.where
        columns: list[list[str]] = [[] for _ in keys]
        for texts in self._good_lines(chunk, result, lambda line: texts_of_line(line, keys, where)):
            if not any(texts):
                result.empty_documents += 1
                continue
            for column, text in zip(columns, texts, strict=True):
                column.append(text)
        return columns

    @staticmethod
    def _good_lines(
        chunk: Chunk, result: Encoded, read: Callable[[bytes], list[Read] | None]
    ) -> Iterator[list[Read]]:
        """What `read` makes of every line; broken lines are noted, never fatal here."""
        for number, line in enumerate(chunk.parts, start=chunk.first_line):
            if line.isspace():
                continue
            try:
                found = read(line)
            except (ValueError, RecursionError) as error:
                result.broken_lines += 1
                if len(result.problems) < MAX_PROBLEMS_PER_CHUNK:
                    result.problems.append(f"{chunk.file}:{number}: {error}")
                continue
            if found is None:
                result.left_out += 1
            else:
                yield found


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def output_prefixes(output_prefix: Path, keys: Sequence[str]) -> list[Path]:
    """NeoX's names: ``<prefix>_<key>_document``."""
    return [output_prefix.with_name(f"{output_prefix.name}_{key}_document") for key in keys]


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM, which schedulers send, cleans up as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def preprocess(
    inputs: Sequence[Path],
    output_prefix: Path,
    tokenizer: Tokenizer,
    options: PreprocessOptions,
    *,
    manifest: dict[str, Any] | None = None,
) -> Outcome:
    """Tokenize ``inputs`` into one dataset per key; ``manifest`` adds entries to their JSON."""
    files, unknown = list_files(list(inputs))
    if unknown:
        kinds = ", ".join(sorted({path.suffix or path.name for path in unknown})[:8])
        log.warning("%d files that are not text are left out (%s)", len(unknown), kinds)
    dtype = best_dtype(tokenizer.vocab_size)
    encoder = Encoder(tokenizer, options, dtype)
    with ExitStack() as stack:
        prefixes = output_prefixes(output_prefix, list(encoder.columns))
        writers = [
            stack.enter_context(IndexedDatasetWriter(prefix, kind))
            for prefix, kind in zip(prefixes, encoder.columns.values(), strict=True)
        ]
        outcome = _tokenize(files, encoder, options, writers)
        if not writers[0].num_sequences:
            raise DataError(_nothing_usable(outcome, files))
    outcome.documents, outcome.tokens = writers[0].num_sequences, writers[0].num_tokens
    for writer in writers:
        writer.write_manifest(
            {
                "text_characters": outcome.text_characters,
                "empty_documents": outcome.empty_documents,
                "broken_lines": outcome.broken_lines,
                "left_out": outcome.left_out,
                "source_hash": outcome.source_hash,
                "tokenizer": describe_tokenizer(tokenizer),
                "append_eod": options.append_eod,
                "ftfy": options.ftfy,
                "splitter": options.splitter,
                "where": options.where,
                **({"chat_template": options.chat.text} if options.chat else {}),
                **(manifest or {}),
            }
        )
    return outcome


def _tokenize(
    files: Sequence[Path],
    encoder: Encoder,
    options: PreprocessOptions,
    writers: Sequence[IndexedDatasetWriter],
) -> Outcome:
    outcome = Outcome(prefixes=[writer.prefix for writer in writers])
    digest = hashlib.blake2b(digest_size=16)

    def hashed_chunks() -> Iterator[Chunk]:
        for chunk in read_chunks(files, options.splitter):
            digest.update(b"".join(chunk.parts))
            yield chunk

    total = sum(path.stat().st_size for path in files)
    with progress_in_bytes(total, "tokenizing", options.progress) as bar:
        for encoded in _encoded(hashed_chunks(), encoder, options.workers):
            for writer, data, sizes in zip(writers, encoded.data, encoded.sizes, strict=True):
                writer.add_packed(data, sizes, ends_document=encoded.ends_document)
            outcome.add(encoded)
            if options.strict and encoded.problems:
                raise DataError(f"{encoded.problems[0]} (--strict: nothing was written)")
            bar.update(max(0, encoded.consumed - bar.n))
            speed = outcome.text_characters / 1e6 / (bar.format_dict["elapsed"] or 1e-9)
            bar.set_postfix_str(f"{speed:.1f} MB text/s", refresh=False)
    outcome.source_hash = digest.hexdigest()
    return outcome


class _Worker:
    """Holds the encoder of a worker process."""

    encoder: ClassVar[Encoder]

    @classmethod
    def start(cls, encoder: Encoder, parent: int) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends us
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
        cls.encoder = encoder

    @classmethod
    def run(cls, chunk: Chunk) -> Encoded:
        return cls.encoder.encode(chunk)


def _end_with_parent(parent: int) -> None:
    """End this worker when its parent is killed; otherwise it would wait forever."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_SECONDS)
    os._exit(1)


def _encoded(chunks: Iterator[Chunk], encoder: Encoder, workers: int) -> Iterator[Encoded]:
    """Results in input order; at most a few chunks per worker are under way."""
    if workers <= 1:
        yield from map(encoder.encode, chunks)
        return
    # fork: the encoder is inherited, not copied through a pipe
    context = multiprocessing.get_context("fork")
    waiting: deque[Future[Encoded]] = deque()
    with ProcessPoolExecutor(workers, context, _Worker.start, (encoder, os.getpid())) as pool:
        try:
            for chunk in chunks:
                waiting.append(pool.submit(_Worker.run, chunk))
                if len(waiting) >= CHUNKS_PER_WORKER * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process died (often: out of memory); nothing was written. "
                "Try fewer --workers."
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _nothing_usable(outcome: Outcome, files: Sequence[Path]) -> str:
    shown = "".join(f"\n  {problem}" for problem in outcome.problems[:PROBLEMS_SHOWN])
    return (
        f"no documents in {len(files)} input file(s), the first being {files[0]}: "
        f"{outcome.broken_lines} broken lines, {outcome.empty_documents} empty documents, "
        f"{outcome.left_out} left out by --where.{shown}"
    )
