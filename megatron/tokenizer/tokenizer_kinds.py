"""The kinds of tokenizers: GPT-2's BPE, any tokenizer.json, bytes, SentencePiece, tiktoken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron.errors import TokenizerError
from megatron.tokenizer.base import (
    END_OF_TEXT,
    HOW_TO_GET_A_VOCABULARY,
    PADDING,
    Tokenizer,
    TokenizerFiles,
    file_digest,
)

EOD_CANDIDATES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")
VOCAB_NAMES = ("gpt2-vocab.json", "vocab.json", "encoder.json")
MERGE_NAMES = ("gpt2-merges.txt", "merges.txt", "vocab.bpe")


@contextmanager
def _reading(what_it_is_not: str, advice: str) -> Iterator[None]:
    """A library's error about an unreadable file, raised with the file's name and advice."""
    try:
        yield
    except Exception as error:
        raise TokenizerError(f"vocab_file {what_it_is_not} ({error}). {advice}") from error


@contextmanager
def _encoding() -> Iterator[None]:
    """A panic of the library's Rust code is not an Exception, and cannot be pickled by a worker.

    Its other errors are plain Exceptions.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(
            f"the tokenizer failed on a text ({str(error).splitlines()[0]:.120}): its file has a "
            "pattern that takes too many steps, or no token for unknown words. Use another "
            "vocab_file."
        ) from None


class _LibraryTokenizer(Tokenizer):
    """Shared by everything the library runs; subclasses build it from ``source``."""

    special = True  # whether the file's own template adds tokens, as NeoX lets it
    eod_candidates: tuple[str, ...] = EOD_CANDIDATES

    def __init__(self, library: tokenizers.Tokenizer, source: Path, fingerprint: str) -> None:
        self._library = library
        ids = library.get_vocab().values()
        self.vocab_size = max(ids, default=-1) + 1  # not their number: a file may leave ids out
        if self.vocab_size > 16 * len(ids) + 1024:
            raise TokenizerError(
                f"vocab_file {source}: its largest id is {self.vocab_size - 1}, but it has only "
                f"{len(ids)} tokens; is it damaged?"
            )
        self.fingerprint = fingerprint
        ends = [library.token_to_id(token) for token in self.eod_candidates]
        found = [eod for eod in ends if eod is not None]
        if not found:
            raise TokenizerError(
                f"vocab_file {source}: none of {', '.join(self.eod_candidates)} is in its "
                "vocabulary, so documents cannot be ended"
            )
        self.eod = found[0]

    def tokenize(self, text: str) -> list[int]:
        with _encoding():
            return list(self._library.encode(_valid(text), add_special_tokens=self.special).ids)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encode(texts, self.special)

    def tokenize_pieces(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encode(texts, False)

    def _encode(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        valid = [_valid(text) for text in texts]
        with _encoding():
            encodings = self._library.encode_batch_fast(valid, add_special_tokens=special)
        return [encoding.ids for encoding in encodings]

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self._library.decode(list(token_ids), skip_special_tokens=False)


class GPT2BPETokenizer(_LibraryTokenizer):
    """GPT-2's byte-level BPE from a vocabulary and a merges file.

    As in GPT-NeoX of 2026, ``<|endoftext|>`` written inside a text is the end-of-document token. It
    was ordinary text in token files whose manifest does not state ``end_of_text: token``.
    """

    special = False
    end_of_text = "token"
    eod_candidates = (END_OF_TEXT,)

    def __init__(self, files: TokenizerFiles) -> None:
        vocab = files.in_directory(VOCAB_NAMES, self.name)
        merges = _merge_file(files, vocab, self.name)
        named = f"{vocab} with merge_file {merges}"
        with _reading(f"{named}: not a BPE vocabulary", HOW_TO_GET_A_VOCABULARY):
            library = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        super().__init__(library, vocab, file_digest(vocab, merges))
        library.add_special_tokens([END_OF_TEXT])


def _merge_file(files: TokenizerFiles, vocab: Path, kind: str) -> Path:
    """The merges given, or those beside the vocabulary."""
    if files.merge_file is not None:
        return files.require("merge_file", kind)
    for name in MERGE_NAMES:
        if (vocab.parent / name).is_file():
            return vocab.parent / name
    return files.require("merge_file", kind)


class HFTokenizer(_LibraryTokenizer):
    """Any ``tokenizer.json``."""

    def __init__(self, files: TokenizerFiles) -> None:
        path = files.in_directory(("tokenizer.json",), self.name)
        super().__init__(_load_json(path), path, file_digest(path))


class HFGPT2Tokenizer(_LibraryTokenizer):
    """GPT-2's tokenizer as Hugging Face ships it: a local folder, or a name on its hub.

    GPT-NeoX adds ``<|padding|>`` to it, the last id of the vocabulary.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        source = files.vocab_file or Path("gpt2")
        whole = source / "tokenizer.json" if source.is_dir() else source
        if not source.exists():
            library, fingerprint = _from_hub(str(source)), f"hub:{source}"
        else:
            is_json = whole.name == "tokenizer.json" and whole.is_file()
            library = _load_json(whole) if is_json else GPT2BPETokenizer(files)._library
            fingerprint = file_digest(*_vocabulary_files(source))
        library.add_special_tokens([PADDING])
        super().__init__(library, source, fingerprint)


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
    with _reading(f"{path}: not a tokenizer.json", HOW_TO_GET_A_VOCABULARY):
        return tokenizers.Tokenizer.from_file(str(path))


def _valid(text: str) -> str:
    """Lone surrogates, which JSON may hold, cannot be passed on: replace them."""
    return text.encode("utf-8", "replace").decode()


class CharLevelTokenizer(Tokenizer):
    """NeoX's numbers: 512 ids, of which 0 to 255 are bytes; 0 ends a document, 1 pads."""

    vocab_size = 512
    eod = 0
    fingerprint = "bytes-512"

    def __init__(self, files: TokenizerFiles | None = None) -> None:
        """It needs no files."""

    def tokenize(self, text: str) -> list[int]:
        # Lone surrogates, as in damaged JSON, become the replacement character's bytes.
        return list(text.encode("utf-8", "replace"))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Ids that are not bytes are skipped; broken UTF-8 shows as the replacement character."""
        return bytes(i for i in token_ids if 0 < i < 256).decode("utf-8", "replace")


class SPMTokenizer(Tokenizer):
    """Documents end with ``<|endoftext|>``, or with the unknown token if the model has none.

    That is GPT-NeoX's rule. Token files prepared before end with the model's own end token; their
    manifest states it.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        import sentencepiece

        path = files.in_directory(("tokenizer.model", "spm.model"), self.name)
        self._library = sentencepiece.SentencePieceProcessor()
        train = "Train one with tools/train_tokenizer.py --type SPMTokenizer."
        with _reading(f"{path}: not a SentencePiece model", train):
            self._library.Load(str(path))
        self.eod = int(self._library.PieceToId(END_OF_TEXT))
        self.vocab_size = int(self._library.GetPieceSize())
        self.fingerprint = file_digest(path)

    def tokenize(self, text: str) -> list[int]:
        return list(self._library.EncodeAsIds(_valid(text)))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return str(self._library.DecodeIds([int(i) for i in token_ids]))


# TiktokenTokenizer: an OpenAI encoding by name, or a local ``.tiktoken`` file.

# cl100k_base's published split pattern, used for local files, which do not carry their own.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TiktokenTokenizer(Tokenizer):
    """``vocab_file`` is a name such as ``cl100k_base``, or the path of a ``.tiktoken`` file."""

    def __init__(self, files: TokenizerFiles) -> None:
        import tiktoken
        from tiktoken.load import load_tiktoken_bpe

        source, names = files.vocab_file, ", ".join(tiktoken.list_encoding_names())
        if source is None:
            raise TokenizerError(f"TiktokenTokenizer needs vocab_file: a .tiktoken file or {names}")
        if source.is_file():
            with _reading(f"{source}: not a .tiktoken file", f"Without one, name one of {names}."):
                ranks = load_tiktoken_bpe(str(source))
                if not ranks:
                    raise ValueError("no tokens in it")
                self._library = tiktoken.Encoding(
                    name=source.stem,
                    pat_str=SPLIT_PATTERN,
                    mergeable_ranks=ranks,
                    special_tokens={END_OF_TEXT: max(ranks.values()) + 1},
                )
            self.fingerprint = file_digest(source)
        else:
            self._library = _named_encoding(str(source), names)
            self.fingerprint = f"tiktoken:{source}"
        self.eod = int(self._library.eot_token)
        self.vocab_size = int(self._library.n_vocab)

    def tokenize(self, text: str) -> list[int]:
        return list(self._library.encode_ordinary(text))

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # One thread: preprocessing already runs one process per core.
        return self._library.encode_ordinary_batch(list(texts), num_threads=1)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return str(self._library.decode([int(i) for i in token_ids]))


def _named_encoding(name: str, known: str):  # type: ignore[no-untyped-def]  # imported on use
    import tiktoken

    if name not in tiktoken.list_encoding_names():
        raise TokenizerError(f"vocab_file {name}: no such file, and not one of {known}")
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:
        raise TokenizerError(
            f"vocab_file {name}: tiktoken could not fetch this encoding "
            f"({type(error).__name__}). Without a network, give the path of a .tiktoken file, or "
            "set TIKTOKEN_CACHE_DIR to a folder that holds it."
        ) from error


TOKENIZERS: dict[str, Callable[[TokenizerFiles], Tokenizer]] = {
    kind.__name__: kind
    for kind in (
        GPT2BPETokenizer,
        HFTokenizer,
        HFGPT2Tokenizer,
        CharLevelTokenizer,
        SPMTokenizer,
        TiktokenTokenizer,
    )
}
