"""Tokenizers run by the `tokenizers` library: GPT-2's BPE and any tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron.errors import TokenizerError
from megatron.tokenizer.base import (
    HOW_TO_GET_A_VOCABULARY,
    Tokenizer,
    TokenizerFiles,
    file_digest,
    register,
)

__all__ = ["GPT2BPETokenizer", "HFGPT2Tokenizer", "HFTokenizer"]

END_OF_TEXT = "<|endoftext|>"
EOD_CANDIDATES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")
VOCAB_NAMES = ("gpt2-vocab.json", "vocab.json", "encoder.json")
MERGE_NAMES = ("gpt2-merges.txt", "merges.txt", "vocab.bpe")


class _LibraryTokenizer(Tokenizer):
    """Shared by everything the library runs; subclasses build the tokenizer and find its eod."""

    def __init__(self, library: tokenizers.Tokenizer, eod: int, digest: str, special: bool) -> None:
        self._library = library
        self._eod = eod
        self._digest = digest
        self._special = special  # whether the file's own template adds tokens, as NeoX lets it

    @property
    def vocab_size(self) -> int:
        return self._library.get_vocab_size()

    @property
    def eod(self) -> int:
        return self._eod

    def tokenize(self, text: str) -> list[int]:
        return list(self._library.encode(_valid(text), add_special_tokens=self._special).ids)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        valid = [_valid(text) for text in texts]
        encodings = self._library.encode_batch_fast(valid, add_special_tokens=self._special)
        return [encoding.ids for encoding in encodings]

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self._library.decode(list(token_ids), skip_special_tokens=False)

    def fingerprint(self) -> str:
        return self._digest


@register("GPT2BPETokenizer")
class GPT2BPETokenizer(_LibraryTokenizer):
    """GPT-2's byte-level BPE from a vocabulary and a merges file.

    As in NeoX, ``<|endoftext|>`` written inside a text is ordinary text; only ``eod`` ends one.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        vocab = files.in_directory(VOCAB_NAMES, self.name)
        merges = _merge_file(files, vocab, self.name)
        try:
            model = models.BPE.from_file(str(vocab), str(merges))
        except Exception as error:
            raise TokenizerError(
                f"vocab_file {vocab} with merge_file {merges}: not a BPE vocabulary ({error}). "
                f"{HOW_TO_GET_A_VOCABULARY}"
            ) from error
        library = tokenizers.Tokenizer(model)
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        eod = library.token_to_id(END_OF_TEXT)
        if eod is None:
            raise TokenizerError(f"vocab_file {vocab}: has no {END_OF_TEXT} to end documents with")
        super().__init__(library, eod, file_digest(vocab, merges), special=False)


def _merge_file(files: TokenizerFiles, vocab: Path, kind: str) -> Path:
    """The merges given, or those beside the vocabulary."""
    if files.merge_file is not None:
        return files.require("merge_file", kind)
    for name in MERGE_NAMES:
        if (vocab.parent / name).is_file():
            return vocab.parent / name
    return files.require("merge_file", kind)


@register("HFTokenizer")
class HFTokenizer(_LibraryTokenizer):
    """Any ``tokenizer.json``."""

    def __init__(self, files: TokenizerFiles) -> None:
        path = files.in_directory(("tokenizer.json",), self.name)
        library = _load_json(path)
        eod = _find_eod(library)
        if eod is None:
            raise TokenizerError(
                f"vocab_file {path}: none of {', '.join(EOD_CANDIDATES)} is in its vocabulary, "
                "so documents cannot be ended"
            )
        super().__init__(library, eod, file_digest(path), special=True)


@register("HFGPT2Tokenizer")
class HFGPT2Tokenizer(_LibraryTokenizer):
    """GPT-2's tokenizer as Hugging Face ships it: a local folder, or a name on its hub."""

    def __init__(self, files: TokenizerFiles) -> None:
        source = files.vocab_file or Path("gpt2")
        library = _local_gpt2(files) if source.exists() else _from_hub(str(source))
        eod = _find_eod(library)
        if eod is None:
            raise TokenizerError(f"{source}: has no {END_OF_TEXT} to end documents with")
        digest = f"hub:{source}" if not source.exists() else file_digest(*_vocabulary_files(source))
        super().__init__(library, eod, digest, special=True)


def _local_gpt2(files: TokenizerFiles) -> tokenizers.Tokenizer:
    assert files.vocab_file is not None
    if files.vocab_file.is_dir() and (files.vocab_file / "tokenizer.json").is_file():
        return _load_json(files.vocab_file / "tokenizer.json")
    if files.vocab_file.name == "tokenizer.json":
        return _load_json(files.vocab_file)
    library = GPT2BPETokenizer(files)._library
    library.add_special_tokens([END_OF_TEXT])
    return library


def _vocabulary_files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    names = ("tokenizer.json", *VOCAB_NAMES, *MERGE_NAMES)
    return [source / name for name in names if (source / name).is_file()]


def _from_hub(name: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_pretrained(name)
    except Exception as error:
        raise TokenizerError(
            f'vocab_file "{name}": not a local folder, and not available from the Hugging Face hub '
            f"({type(error).__name__}). Without a network, give a folder with tokenizer.json or "
            f"with vocab.json and merges.txt. {HOW_TO_GET_A_VOCABULARY}"
        ) from error


def _load_json(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise TokenizerError(
            f"vocab_file {path}: not a tokenizer.json ({error}). {HOW_TO_GET_A_VOCABULARY}"
        ) from error


def _find_eod(library: tokenizers.Tokenizer) -> int | None:
    for token in EOD_CANDIDATES:
        found: int | None = library.token_to_id(token)
        if found is not None:
            return found
    return None


def _valid(text: str) -> str:
    """Lone surrogates, which JSON may hold, cannot be passed on: replace them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text
