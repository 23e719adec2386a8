"""CharLevelTokenizer: every byte of the UTF-8 text is a token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.errors import TokenizerError
from megatron.tokenizer.base import Tokenizer, TokenizerFiles, file_digest, register

__all__ = ["CharLevelTokenizer", "SPMTokenizer", "TiktokenTokenizer"]


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


# SPMTokenizer: a SentencePiece model.


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


# TiktokenTokenizer: an OpenAI encoding by name, or a local ``.tiktoken`` file.

END_OF_TEXT = "<|endoftext|>"
# cl100k_base's published split pattern, used for local files, which do not carry their own.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@register("TiktokenTokenizer")
class TiktokenTokenizer(Tokenizer):
    """``vocab_file`` is a name such as ``cl100k_base``, or the path of a ``.tiktoken`` file."""

    def __init__(self, files: TokenizerFiles) -> None:
        import tiktoken

        source = files.vocab_file
        if source is None:
            names = ", ".join(tiktoken.list_encoding_names())
            raise TokenizerError(f"TiktokenTokenizer needs vocab_file: a .tiktoken file or {names}")
        if source.is_file():
            self._library = _from_file(source)
            self._digest = file_digest(source)
        else:
            self._library = _from_name(str(source))
            self._digest = f"tiktoken:{source}"

    @property
    def vocab_size(self) -> int:
        return int(self._library.n_vocab)

    @property
    def eod(self) -> int:
        return int(self._library.eot_token)

    def tokenize(self, text: str) -> list[int]:
        return list(self._library.encode_ordinary(text))

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # One thread: preprocessing already runs one process per core.
        return self._library.encode_ordinary_batch(list(texts), num_threads=1)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return str(self._library.decode([int(i) for i in token_ids]))

    def fingerprint(self) -> str:
        return self._digest


def _from_file(path: Path):  # type: ignore[no-untyped-def]  # tiktoken is imported on use
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    try:
        ranks = load_tiktoken_bpe(str(path))
        if not ranks:
            raise ValueError("no tokens in it")
        return tiktoken.Encoding(
            name=path.stem,
            pat_str=SPLIT_PATTERN,
            mergeable_ranks=ranks,
            special_tokens={END_OF_TEXT: max(ranks.values()) + 1},
        )
    except Exception as error:
        raise TokenizerError(f"vocab_file {path}: not a .tiktoken file ({error})") from error


def _from_name(name: str):  # type: ignore[no-untyped-def]
    import tiktoken

    if name not in tiktoken.list_encoding_names():
        known = ", ".join(tiktoken.list_encoding_names())
        raise TokenizerError(f"vocab_file {name}: no such file, and not one of {known}")
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:
        raise TokenizerError(
            f"vocab_file {name}: tiktoken could not fetch this encoding "
            f"({type(error).__name__}). Without a network, give the path of a .tiktoken file, or "
            "set TIKTOKEN_CACHE_DIR to a folder that holds it."
        ) from error
