"""Tokenizers in a Hugging Face folder: written for AutoTokenizer, found again on the way back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer
from transformers import PreTrainedTokenizerFast

from megatron.tokenizer import Tokenizer

__all__ = ["tokenizer_settings", "write_tokenizer"]

BYTE_LEVEL_MARK = "<|byte_level_eod|>"


def write_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_length: int) -> str | None:
    """Write tokenizer.json and its settings; the reason why not, where there is no such form."""
    library = _library_of(tokenizer)
    if library is None:
        return (
            f"{tokenizer.name} has no tokenizer.json form; use megatron.tokenizer with the "
            "original files"
        )
    eos = library.id_to_token(tokenizer.eod)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=library,
        eos_token=eos,
        bos_token=eos,
        unk_token=None,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)
    _name_class_for_every_version(folder / "tokenizer_config.json")
    return None


def _name_class_for_every_version(path: Path) -> None:
    """transformers 5 writes a class name that 4 does not know; both know this one."""
    settings = json.loads(path.read_text("utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _library_of(tokenizer: Tokenizer) -> LibraryTokenizer | None:
    library = getattr(tokenizer, "_library", None)
    if isinstance(library, LibraryTokenizer):
        copy = LibraryTokenizer.from_str(library.to_str())
        copy.add_special_tokens([copy.id_to_token(tokenizer.eod)])
        return copy
    return _byte_level(tokenizer.vocab_size) if tokenizer.name == "CharLevelTokenizer" else None


def _byte_level(size: int) -> LibraryTokenizer:
    """Every byte of the text is its own id: a BPE without merges over GPT-2's byte letters."""
    vocabulary = {letter: byte for byte, letter in _byte_letters().items() if byte > 0}
    vocabulary[BYTE_LEVEL_MARK] = 0
    vocabulary |= {f"<|unused{i}|>": i for i in range(256, size)}
    library = LibraryTokenizer(models.BPE(vocabulary, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # ids that are no byte say nothing
    nothing = decoders.Replace(Regex(r"<\|unused\d+\|>"), "")
    library.decoder = decoders.Sequence([nothing, decoders.ByteLevel()])
    library.add_special_tokens([BYTE_LEVEL_MARK])
    return library


def _byte_letters() -> dict[int, str]:
    """GPT-2's printable letter for each byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters = {byte: chr(byte) for byte in printable}
    rest = [byte for byte in range(256) if byte not in printable]
    return letters | {byte: chr(256 + place) for place, byte in enumerate(rest)}


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """The config keys that make our tokenizer from a Hugging Face folder's files."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return {}
    if BYTE_LEVEL_MARK.encode() in file.read_bytes():
        return {"tokenizer_type": "CharLevelTokenizer"}
    return {"tokenizer_type": "HFTokenizer", "vocab_file": str(file)}
