"""CharLevelTokenizer: every byte of the UTF-8 text is a token."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.tokenizer.base import Tokenizer, TokenizerFiles, register

__all__ = ["CharLevelTokenizer"]


@register("CharLevelTokenizer")
class CharLevelTokenizer(Tokenizer):
    """NeoX's numbers: 512 ids, of which 0 to 255 are bytes; 0 ends a document, 1 pads."""

    def __init__(self, files: TokenizerFiles | None = None) -> None:
        self.pad = 1

    @property
    def vocab_size(self) -> int:
        return 512

    @property
    def eod(self) -> int:
        return 0

    def tokenize(self, text: str) -> list[int]:
        # Lone surrogates, as in damaged JSON, become the replacement character's bytes.
        return list(text.encode("utf-8", "replace"))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Ids that are not bytes are skipped; broken UTF-8 shows as the replacement character."""
        return bytes(i for i in token_ids if 0 < i < 256).decode("utf-8", "replace")

    def fingerprint(self) -> str:
        return "bytes-512"
