"""prepare_data.py, as a user runs it."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.commands import run as command_run
from megatron.data import IndexedDataset, build_train_valid_test_datasets
from megatron.data.corpora import SOURCES, standard_library_files
from tests.conftest import REPOSITORY
from tests.data.samples import corpus, prepare, text_of


def test_the_standard_library_from_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "prepare_data.py", "-d", str(tmp_path), "stdlib"]
    first = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert "documents" in first.stdout
    prefix = tmp_path / "stdlib" / "stdlib_text_document"
    data, files = IndexedDataset(prefix), standard_library_files()
    filled = [path for path in files if path.stat().st_size]
    assert len(data) == len(filled)
    for document in (0, len(filled) // 2, len(filled) - 1):
        assert text_of(prefix, document) == filled[document].read_bytes().decode()
        assert data[document][-1] == 0
    manifest = json.loads(prefix.with_suffix(".json").read_text())
    assert manifest["tokens"] == data.total_tokens and manifest["documents"] == len(data)
    assert manifest["tokenizer"]["type"] == "CharLevelTokenizer"
    assert platform.python_version() in manifest["python"]
    assert manifest["source_hash"]
    train, valid, test = build_train_valid_test_datasets(prefix, "949,50,1", (9, 9, 9), 128, 512)
    assert train is not None and valid is not None and test is not None

    before = prefix.with_suffix(".bin").stat().st_mtime_ns
    again = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert "up to date" in again.stdout
    assert prefix.with_suffix(".bin").stat().st_mtime_ns == before


def test_a_users_own_folder_under_any_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = corpus(tmp_path)
    prefix = tmp_path / "data" / "novels" / "novels_text_document"
    assert prepare(tmp_path, "--input", source, "--", "novels") == 0
    assert text_of(prefix, 0) == "my own text" and text_of(prefix, 1) == "more of it"
    assert prepare(tmp_path, "novels", "--input", source) == 0
    assert "up to date" in capsys.readouterr().out
    (source / "a.txt").write_text("my new text")
    assert prepare(tmp_path, "novels", "--input", source) == 0
    assert text_of(prefix, 0) == "my new text"
    assert prepare(tmp_path, "novels", "--input", source, "--force") == 0
    assert "up to date" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nosuchcorpus"], "openwebtext2, github, arxiv"),
        (["../escape", "--input", "."], "cannot be the name"),
        (["novels", "--input", "/does/not/exist"], "no such file"),
        (["a", "b", "--input", "."], "one NAME"),
        (["stdlib", "-t", "HFTokenizer"], "needs vocab_file"),
    ],
)
def test_mistakes_exit_with_a_message(
    tmp_path: Path, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(tmp_path, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error:") and reason in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["prepare_data", "novels", "--input", ""], "an empty path"),
        (["preprocess_data", "--input", ""], "an empty path"),
        (["train_tokenizer", "--input", ""], "an empty path"),
        (["prepare_data", "novels", "--input", ".", "--workers", "-2"], "--workers -2: at least 1"),
        (
            ["prepare_data", "novels", "--input", ".", "--jsonl-key", "a/b"],
            "'a/b': must be usable in a file name",
        ),
        (
            ["train_tokenizer", "--input", ".", "--output-dir", "x", "--max-megabytes", "0"],
            "--max-megabytes 0.0: must be above 0",
        ),
    ],
)
def test_nothing_is_read_after_a_mistake(
    words: list[str],
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An unset variable of the shell gives an empty path, which is not the current folder."""
    monkeypatch.chdir(tmp_path)
    try:
        code = command_run(words[0], words[1:])
    except SystemExit as ending:
        code = ending.code
    assert code == 2
    assert reason in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_help_lists_every_corpus(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_run("prepare_data", ["--help"])
    text = capsys.readouterr().out
    required = {"openwebtext2", "github", "arxiv", "enwik8", "wikitext103", "pile", "pile_subset"}
    for name in {*required, "stdlib", *SOURCES}:
        assert name in text and SOURCES[name].licence


def test_gpt_neoxs_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a name it is enwik8; -v, -m and -f are GPT-NeoX's."""
    from megatron.commands import data_tools

    asked: list[tuple[str, object]] = []
    monkeypatch.setattr(
        data_tools, "prepare_corpus", lambda name, request: (asked.append((name, request)), None)
    )
    monkeypatch.setattr(data_tools, "report", lambda *parts: "")
    monkeypatch.setattr(data_tools, "_hint", lambda *parts: None)
    words = ["-d", str(tmp_path), "-v", "v.json", "-m", "m.txt", "-t", "GPT2BPETokenizer"]
    assert command_run("prepare_data", [*words, "-f"]) == 0
    ((name, request),) = asked
    assert name == "enwik8"
    assert isinstance(request, data_tools.PrepareRequest) and request.force
    assert (request.vocab_file, request.merge_file) == (Path("v.json"), Path("m.txt"))


def test_the_door_where_gpt_neox_has_its_preprocessing(tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text("some text\n")
    tool = REPOSITORY / "tools" / "datasets" / "preprocess_data.py"
    words = ["--input", str(text), "--output-prefix", str(tmp_path / "own"), "--dataset-impl"]
    words += ["mmap", "--tokenizer-type", "CharLevelTokenizer", "--append-eod", "--num-docs", "1"]
    subprocess.run([sys.executable, str(tool), *words], check=True, cwd=tmp_path)
    assert text_of(tmp_path / "own_text_document", 0) == "some text\n"


def test_the_name_may_follow_the_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = corpus(tmp_path)
    assert prepare(tmp_path, "--input", source, "novels") == 0
    assert prepare(tmp_path, "--input", source / "a.txt", source / "b.jsonl", "arxiv") == 0
    assert len(IndexedDataset(tmp_path / "data" / "arxiv" / "arxiv_text_document")) == 2
    for arguments in (["--input", source], ["--input", source / "a.txt", source / "b.jsonl"]):
        with pytest.raises(SystemExit) as stopped:
            prepare(tmp_path, *arguments)
        assert stopped.value.code == 2
        assert "NAME" in capsys.readouterr().err


def test_the_corpus_in_numbers_and_the_next_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    for state in ("ready", "up to date"):
        assert prepare(tmp_path, "--input", corpus_once(tmp_path), "--", "novels") == 0
        shown = capsys.readouterr()
        prefix = tmp_path / "data" / "novels" / "novels_text_document"
        assert shown.out.splitlines() == [
            f"novels: {state}, {prefix}",
            "  2 documents, 23 tokens",
            "  tokens per document: 11 to 12, median 11, mean 12",
            "  about 6 words: 3.83 tokens a word, 0.91 characters a token",
        ]
        assert shown.err == (
            f"next: python deepy.py train.py configs/laptop/tiny.yml --set data_path={prefix} "
            "tokenizer_type=CharLevelTokenizer save=runs/novels load=runs/novels\n"
        )
    source, kind = corpus_once(tmp_path), "GPT2BPETokenizer"
    assert prepare(tmp_path, "--input", source, "-t", kind, "--force", "--", "novels") == 0
    vocabulary = Path(capsys.readouterr().err.split(" vocab_file=")[1].strip())
    assert (vocabulary / "encoder.json").is_file() or (vocabulary / "vocab.json").is_file()


def corpus_once(folder: Path) -> Path:
    return folder / "mine" if (folder / "mine").exists() else corpus(folder)


def test_the_last_word_is_the_name_also_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--input books books`; without a NAME, a path is not taken for one."""
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("my own text")
    monkeypatch.chdir(tmp_path)
    assert command_run("prepare_data", ["-q", "--input", "books", "books"]) == 0
    assert text_of(tmp_path / "data" / "books" / "books_text_document", 0) == "my own text"
    assert command_run("prepare_data", ["-q", "books"]) == 0, "made before, from own files"
    assert "up to date" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command_run("prepare_data", ["-q", "--input", "books", "books/a.txt"])
    assert "needs a NAME" in capsys.readouterr().err
