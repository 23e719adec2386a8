"""Vocabularies learned from text: every kind works, and a pattern of one's own is obeyed."""

from __future__ import annotations

from pathlib import Path

import pytest
import regex

from megatron.commands import run as command_run
from megatron.data.corpora import standard_library_files
from megatron.tokenizer import build_tokenizer
from tests.tokenizer.test_tokenizer_kinds import HARD

TRAINED = {"GPT2BPETokenizer": "merges.txt", "HFTokenizer": "", "SPMTokenizer": ""}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(
        "\n".join(p.read_text() for p in standard_library_files()[:12])
    )
    for kind in TRAINED:
        arguments = ["--input", str(folder / "text.txt"), "--output-dir", str(folder / kind)]
        assert (
            command_run(
                "train_tokenizer", [*arguments, "--vocab-size", "600", "--type", kind, "-q"]
            )
            == 0
        )
    return folder


@pytest.mark.parametrize("kind", TRAINED)
def test_trained_tokenizers_work(trained: Path, kind: str) -> None:
    tokenizer = build_tokenizer(kind, vocab_file=trained / kind)
    text = "import os\n\ndef main() -> int:\n    return 0"
    ids = tokenizer.tokenize(text)
    assert len(ids) < len(text)
    assert min(ids) >= 0 and max(ids) < tokenizer.vocab_size <= 600
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    assert tokenizer.tokenize_batch([text, "", HARD])[0] == ids
    restored = tokenizer.detokenize(ids)
    # SentencePiece treats runs of blanks and line ends as blanks
    assert restored == text or (kind == "SPMTokenizer" and restored.split() == text.split())
    tokenizer.tokenize("lone surrogate \ud800")


def test_training_on_nothing_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.jsonl").write_text("not json\n")
    for arguments in (
        ["--input", str(tmp_path / "bad.jsonl")],
        ["--input", str(tmp_path / "missing")],
        ["--input", str(tmp_path / "bad.jsonl"), "--vocab-size", "10"],
    ):
        assert (
            command_run("train_tokenizer", [*arguments, "--output-dir", str(tmp_path / "o")]) == 2
        )
        assert capsys.readouterr().err.startswith("error: ")


PATTERN = r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"


def test_a_pattern_of_ones_own_cuts_what_is_learned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "2026 und 1234567 Häuser, 1234567 mal: ١٢٣٤٥ дома!\n" * 50
    (tmp_path / "text.txt").write_text(text, "utf-8")
    command = ["--input", str(tmp_path / "text.txt"), "--output-dir", str(tmp_path / "o"), "-q"]
    chosen = ["--vocab-size", "400", "--type", "HFTokenizer", "--pattern"]
    assert command_run("train_tokenizer", [*command, *chosen, PATTERN]) == 0
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=tmp_path / "o" / "tokenizer.json")
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    pieces = [tokenizer.detokenize([i]) for i in ids]
    assert max(sum(letter.isdigit() for letter in piece) for piece in pieces) == 3
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(tmp_path / "o" / "tokenizer.json"))
    split = library.pre_tokenizer.pre_tokenize_str(text)
    expected = [match.span() for match in regex.finditer(PATTERN, text)]
    assert [span for _, span in split] == expected, "the library reads the pattern as regex does"
    for wrong in ([*chosen, "(["], [*chosen, "x*"], ["--pattern", "x", "--vocab-size", "400"]):
        assert command_run("train_tokenizer", [*command, *wrong]) == 2
        assert capsys.readouterr().err.startswith("error: --pattern")
