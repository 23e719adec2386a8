"""SPMTokenizer: a SentencePiece model."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.tokenizer.base import (
    Tokenizer,
    TokenizerError,
    TokenizerFiles,
    file_digest,
    register,
)

__all__ = ["SPMTokenizer"]


@register("SPMTokenizer")
class SPMTokenizer(Tokenizer):
    """Documents end with ``<|endoftext|>`` if the model has it, else with its own end token."""

    def __init__(self, files: TokenizerFiles) -> None:
        import sentencepiece

        path = files.in_directory(("tokenizer.model", "spm.model"), self.name)
        self._library = sentencepiece.SentencePieceProcessor()
        try:
            self._library.Load(str(path))
        except (RuntimeError, OSError) as error:
            raise TokenizerError(
                f"vocab_file {path}: not a SentencePiece model ({error}). Train one with "
                "tools/train_tokenizer.py --type SPMTokenizer."
            ) from error
        eod = self._library.PieceToId("<|endoftext|>")
        if eod == self._library.unk_id():
            eod = self._library.eos_id()
        if eod < 0:
            raise TokenizerError(f"vocab_file {path}: has no <|endoftext|> and no end token")
        self._eod = int(eod)
        self._digest = file_digest(path)

    @property
    def vocab_size(self) -> int:
        return int(self._library.GetPieceSize())

    @property
    def eod(self) -> int:
        return self._eod

    def tokenize(self, text: str) -> list[int]:
        return list(self._library.EncodeAsIds(text.encode("utf-8", "replace").decode()))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return str(self._library.DecodeIds([int(i) for i in token_ids]))

    def fingerprint(self) -> str:
        return self._digest
