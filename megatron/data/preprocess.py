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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tqdm import tqdm

from megatron.atomic_files import write_json
from megatron.data.chunks import (
    DOCUMENT_SPLITTERS,
    Chunk,
    EncodedChunk,
    Encoder,
    Problem,
    read_chunks,
)
from megatron.data.indexed_dataset import bin_path, describe_tokenizer, idx_path, manifest_path
from megatron.data.streams import list_files
from megatron.data.writer import IndexedDatasetWriter, best_dtype
from megatron.errors import DataError
from megatron.tokenizer import Tokenizer

log = logging.getLogger(__name__)

CHUNKS_PER_WORKER = 8  # how far reading may run ahead; bounds the memory
PROBLEMS_SHOWN = 10
PARENT_POLL_SECONDS = 2.0


@dataclass(frozen=True)
class PreprocessOptions:
    """How text becomes tokens; everything that can change the result."""

    keys: tuple[str, ...] = ("text",)
    append_eod: bool = True
    ftfy: bool = False
    splitter: str = "file"
    where: tuple[tuple[str, str], ...] = ()
    """Only JSON lines with these values: (("meta.pile_set_name", "Github"),)."""
    strict: bool = False
    workers: int = 1
    progress: bool = True


@dataclass
class Outcome:
    """What one run read and wrote."""

    prefixes: list[Path] = field(default_factory=list)
    documents: int = 0
    tokens: int = 0
    text_characters: int = 0
    empty_documents: int = 0
    left_out: int = 0
    broken_lines: int = 0
    problems: list[Problem] = field(default_factory=list)
    source_hash: str = ""


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def output_prefixes(output_prefix: Path, keys: Sequence[str]) -> list[Path]:
    """NeoX's names: ``<prefix>_<key>_document``."""
    return [output_prefix.with_name(f"{output_prefix.name}_{key}_document") for key in keys]


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM, which schedulers send, cleans up as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, interrupt)
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
    if options.splitter not in DOCUMENT_SPLITTERS:
        known = ", ".join(DOCUMENT_SPLITTERS)
        raise DataError(f'text splitter "{options.splitter}" is unknown; use one of {known}')
    files, unknown = list_files(list(inputs))
    if unknown:
        kinds = ", ".join(sorted({path.suffix or path.name for path in unknown})[:8])
        log.warning("%d files that are not text are left out (%s)", len(unknown), kinds)
    dtype = best_dtype(tokenizer.vocab_size)
    encoder = Encoder(
        tokenizer,
        options.keys,
        dtype,
        append_eod=options.append_eod,
        ftfy=options.ftfy,
        where=options.where,
    )
    outcome = Outcome(prefixes=output_prefixes(output_prefix, options.keys))
    digest = hashlib.blake2b(digest_size=16)
    with ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedDatasetWriter(prefix, dtype)) for prefix in outcome.prefixes
        ]
        chunks = _hashed(read_chunks(files, options.splitter), digest)
        bar = stack.enter_context(_progress_bar(files, options.progress))
        for encoded in _encoded(chunks, encoder, options.workers):
            _write(writers, encoded)
            _account(outcome, encoded, options.strict)
            _advance(bar, outcome, encoded)
        if not writers[0].num_sequences:
            raise DataError(_nothing_usable(outcome, files))
        for prefix in outcome.prefixes:  # an older description must never meet the new files
            manifest_path(prefix).unlink(missing_ok=True)
        outcome.documents, outcome.tokens = writers[0].num_sequences, writers[0].num_tokens
    outcome.source_hash = digest.hexdigest()
    checksums = [writer.checksums for writer in writers]
    _write_manifests(outcome, tokenizer, options, manifest or {}, checksums)
    return outcome


def _hashed(chunks: Iterable[Chunk], digest: Any) -> Iterator[Chunk]:
    for chunk in chunks:
        for part in chunk.parts:
            digest.update(part)
        yield chunk


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
    def run(cls, chunk: Chunk) -> EncodedChunk:
        return cls.encoder.encode(chunk)


def _end_with_parent(parent: int) -> None:
    """A parent that was killed cannot tell its workers; without this they would wait forever."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_SECONDS)
    os._exit(1)


def _encoded(chunks: Iterator[Chunk], encoder: Encoder, workers: int) -> Iterator[EncodedChunk]:
    """Results in input order; at most a few chunks per worker are under way."""
    if workers <= 1:
        yield from map(encoder.encode, chunks)
        return
    # fork: the encoder is inherited, not copied through a pipe
    context = multiprocessing.get_context("fork")
    waiting: deque[Future[EncodedChunk]] = deque()
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


def _write(writers: Sequence[IndexedDatasetWriter], encoded: EncodedChunk) -> None:
    for writer, data, sizes in zip(writers, encoded.data, encoded.sizes, strict=True):
        if not encoded.piece:
            writer.add_packed(data, sizes)
            continue
        writer.add_piece(data)
        if encoded.ends_document:
            writer.end_document()


def _account(outcome: Outcome, encoded: EncodedChunk, strict: bool) -> None:
    outcome.text_characters += encoded.text_characters
    outcome.empty_documents += encoded.empty
    outcome.left_out += encoded.left_out
    outcome.broken_lines += encoded.broken
    room = 1000 - len(outcome.problems)
    outcome.problems += encoded.problems[:room]
    if strict and encoded.problems:
        raise DataError(f"{encoded.problems[0]} (--strict: nothing was written)")


def _progress_bar(files: Sequence[Path], enabled: bool) -> tqdm[Any]:
    total = sum(path.stat().st_size for path in files)
    return tqdm(
        total=total, unit="B", unit_scale=True, desc="tokenizing", disable=None if enabled else True
    )


def _advance(bar: tqdm[Any], outcome: Outcome, encoded: EncodedChunk) -> None:
    bar.update(max(0, min(encoded.consumed, int(bar.total or 0)) - bar.n))
    elapsed = bar.format_dict["elapsed"] or 1e-9
    bar.set_postfix_str(f"{outcome.text_characters / 1e6 / elapsed:.1f} MB text/s", refresh=False)


def _nothing_usable(outcome: Outcome, files: Sequence[Path]) -> str:
    shown = "".join(f"\n  {problem}" for problem in outcome.problems[:PROBLEMS_SHOWN])
    return (
        f"no documents in {len(files)} input file(s), the first being {files[0]}: "
        f"{outcome.broken_lines} broken lines, {outcome.empty_documents} empty documents, "
        f"{outcome.left_out} left out by --where.{shown}"
    )


def _write_manifests(
    outcome: Outcome,
    tokenizer: Tokenizer,
    options: PreprocessOptions,
    extra: dict[str, Any],
    checksums: Sequence[dict[str, str]],
) -> None:
    for prefix, sums in zip(outcome.prefixes, checksums, strict=True):
        write_json(
            manifest_path(prefix),
            {
                "format": 1,
                "documents": outcome.documents,
                "tokens": outcome.tokens,
                "text_characters": outcome.text_characters,
                "empty_documents": outcome.empty_documents,
                "broken_lines": outcome.broken_lines,
                "source_hash": outcome.source_hash,
                "tokenizer": describe_tokenizer(tokenizer),
                "append_eod": options.append_eod,
                "ftfy": options.ftfy,
                "splitter": options.splitter,
                "where": [list(pair) for pair in options.where],
                "left_out": outcome.left_out,
                "bin_bytes": bin_path(prefix).stat().st_size,
                "idx_bytes": idx_path(prefix).stat().st_size,
                **sums,
                **extra,
            },
        )
