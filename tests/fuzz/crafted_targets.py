"""Files that somebody made on purpose, for the fuzz harness: each case is built, not spoilt."""

from __future__ import annotations

import json
import os
import random
import struct
import zipfile
from pathlib import Path

import numpy as np
import torch
import yaml
import zstandard

from megatron.checkpoints import read_checkpoint
from megatron.checkpoints.pickle_check import NEVER_CALLED
from megatron.checkpoints.safe_files import OTHER_NAMES, TORCH_NAMES, load_file
from megatron.checkpoints.store import CHECKSUMS
from megatron.data import IndexedDatasetWriter
from megatron.data.preprocess import PreprocessOptions, preprocess
from megatron.errors import KerpleError
from megatron.neox_arguments import OWNER
from megatron.neox_arguments.run_keys import DataArgs
from megatron.paper.suite import load_suite
from megatron.paper.suite_file import SUITE_DIRECTORY
from megatron.tokenizer import build_tokenizer
from megatron.training.metrics import check_data, data_identity
from tests.checkpoints.small_models import saved_model
from tests.fuzz.mutations import mutated
from tests.fuzz.target import Target

NAMES = sorted({*TORCH_NAMES, *OTHER_NAMES, *NEVER_CALLED})
CONSTANTS = (
    b"N", b"\x88", b"\x89", b"K\x00", b"K\x04", b"M\x00\x10", b"J\x00\x00\x00\x10",
    b")", b"]", b"}",
    b"X\x07\x00\x00\x00storage", b"X\x01\x00\x00\x000", b"X\x03\x00\x00\x00cpu",
    b"X\x06\x00\x00\x00latin1", b"X\x02\x00\x00\x00f8", b"K\x00\x85", b"K\x04\x85", b"K\x01\x85",
)  # fmt: skip
STORAGE = (
    b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
)
VERBS = (*(bytes([code]) for code in b"R\x81b\x85\x86\x87(tsuaeQ"), b"q\x00", b"h\x00")


def opcodes(folder: Path) -> Target:
    """Pickles of random opcodes over the names that are allowed."""
    path = folder / "x.pt"
    torch.save({"w": torch.arange(4.0)}, path)

    def spoil(path: Path, generator: random.Random) -> None:
        body = b""
        for _ in range(generator.randrange(1, 12)):
            name = generator.choice(NAMES).rpartition(".")
            call = f"c{name[0]}\n{name[2]}\n".encode()
            arguments = b"".join(generator.choices((*CONSTANTS, STORAGE), k=generator.randrange(6)))
            made = call + b"(" + arguments + b"t"
            single = generator.choice((*VERBS, *CONSTANTS, STORAGE))
            body += generator.choice((made + b"R", made + b"\x81", single))
        data = b"\x80\x02}X\x01\x00\x00\x00w" + body + b"s."
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x/data.pkl", data)
            archive.writestr("x/byteorder", "little")
            archive.writestr("x/data/0", np.arange(4, dtype=np.float32).tobytes())
            archive.writestr("x/version", "3\n")

    def read(path: Path) -> object:
        found = [load_file(path, mmap=mmap) for mmap in (False, True, False)]
        shown = [_shown(item) for item in found]
        assert shown[0] == shown[1] == shown[2], "other numbers at each load"
        return None

    return Target(folder, [path], read, spoil=spoil)


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        assert value.numel() <= 4, "more numbers than the file has"
    if isinstance(value, dict):
        return str([(_shown(key), _shown(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return str([_shown(item) for item in value])
    plain = isinstance(value, torch.Tensor | np.ndarray | str | bytes | int | float)
    return repr(value) if plain else type(value).__name__


def archives(folder: Path) -> Target:
    """Two archives in one file, their end records mixed; both readers must see the same one."""
    path, other = folder / "x.pt", folder / "y.pt"
    torch.save({"w": torch.zeros(4)}, path)
    torch.save({"w": torch.ones(9)}, other)
    first, second = other.read_bytes(), path.read_bytes()

    def spoil(path: Path, generator: random.Random) -> None:
        body, record, end = second[:-98], second[-98:-42], second[-22:]
        place = generator.choice((0, len(first) - 98, len(first) + len(body), len(body)))
        locator = b"PK\x06\x07" + struct.pack("<IQI", 0, place, 1)
        parts = [first, body, record, locator, end]
        if generator.random() < 0.5:
            generator.shuffle(parts)
        chosen = [part for part in parts if generator.random() < 0.9]
        data = generator.choice((b"".join(chosen), first + second[:-42] + locator + end))
        path.write_bytes(data if generator.random() < 0.7 else mutated(data, generator, text=False))

    def read(path: Path) -> object:
        load_file(path)
        with zipfile.ZipFile(path) as archive:
            (name,) = (item for item in archive.namelist() if item.endswith("data.pkl"))
            seen = archive.read(name)
        assert seen == torch._C.PyTorchFileReader(str(path)).get_record("data.pkl")
        return None

    return Target(folder, [path], read, spoil=spoil)


def tokenizers(folder: Path) -> Target:
    """Vocabularies with gaps and patterns that take exponentially many steps."""
    path = folder / "tokenizer.json"

    def write(vocabulary: dict[str, int], pattern: str) -> None:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
        content = {"version": "1.0", "pre_tokenizer": {**split, "invert": False}, "model": model}
        path.write_text(json.dumps(content))

    write({"[UNK]": 0, "<|endoftext|>": 1}, "x")

    def spoil(path: Path, generator: random.Random) -> None:
        largest = generator.choice((3, 100, 70_000, 2**31, 2**32 - 1, 2**40))
        words = ["[UNK]", "<|endoftext|>", *"abcdef"]
        chosen = {word: generator.randrange(largest) for word in words if generator.random() < 0.95}
        write(chosen, generator.choice(("x", "(a+)+$", "(a|aa)+$", "(", "\\p{L}+", "(a*)*b")))

    def read(path: Path) -> None:
        tokenizer = build_tokenizer("HFTokenizer", vocab_file=path)
        ids = tokenizer.tokenize("a b " + "a" * 5000 + "c")
        assert all(0 <= number < tokenizer.vocab_size for number in ids)

    return Target(folder, [path], read, spoil=spoil)


def manifests(folder: Path) -> Target:
    """A run's manifest, spoilt, beside other data of the same size: never accepted in silence."""
    with IndexedDatasetWriter(folder / "d") as writer:
        writer.add_document(range(100))
    path, tokens = folder / "manifest.json", folder / "d.bin"
    data = DataArgs(data_path=str(folder / "d"))
    path.write_text(json.dumps({"data": data_identity(data), "history": []}, indent=1))
    honest, kept = tokens.read_bytes(), path.read_bytes()

    def read(path: Path) -> None:
        if path.read_bytes() == kept:
            assert check_data(folder / "global_step1", data, ()) == []
            return
        tokens.write_bytes(honest[::-1])
        try:
            assert check_data(folder / "global_step1", data, ()), (
                "other data was accepted without a word"
            )
        finally:
            tokens.write_bytes(honest)

    return Target(folder, [path], read, text=True)


def suites(folder: Path) -> Target:
    """A suite that chooses hosts, programs or places: always refused."""
    path = folder / "suite.yml"
    content = yaml.safe_load((SUITE_DIRECTORY / "smoke.yml").read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump(content))
    kept = path.read_bytes()
    launcher = [key for key, group in OWNER.items() if group == "launcher"]
    words = [["-d", "/x"], ["--input", "/etc/passwd"], ["--data=/x"], ["-vx"], ["--input", "../x"]]

    def spoil(path: Path, generator: random.Random) -> None:
        changed = yaml.safe_load(kept)
        if generator.random() < 0.3:
            generator.choice([*changed["data"].values()])["prepare"] = generator.choice(words)
        else:
            key = generator.choice([*launcher, "eval_include_path", "tensorboard_dir", "log_dir"])
            key = key.replace("_", generator.choice("_-"))
            part = generator.choice([*changed["models"].values(), *changed["data"].values()])
            value = generator.choice(("x", 1, True, "/x", "-R exec"))
            part.setdefault("config", {})[key] = value
        path.write_text(yaml.safe_dump(changed))

    def read(path: Path) -> None:
        if path.read_bytes() == kept:
            load_suite(str(path))
            return
        try:
            load_suite(str(path))
        except KerpleError:
            raise
        raise AssertionError("a suite chose what it may not")

    return Target(folder, [path], read, spoil=spoil)


def special_files(folder: Path) -> Target:
    """A FIFO, a device or a folder in the place of a checkpoint's file."""
    saved_model(folder, pos_emb="kerple_log")
    step = folder / "global_step5"
    (step / CHECKSUMS).unlink()
    files = sorted(path for path in folder.rglob("*") if path.is_file())

    def spoil(path: Path, generator: random.Random) -> None:
        path.unlink()
        match generator.randrange(4):
            case 0:
                os.mkfifo(path)
            case 1:
                path.symlink_to("/dev/zero")
            case 2:
                path.symlink_to(path)
            case _:
                path.symlink_to(folder)

    return Target(folder, files, lambda path: read_checkpoint(folder).iteration, spoil=spoil)


def bombs(folder: Path) -> Target:
    """Kilobytes of zstd that stand for one line of tens of megabytes."""
    path = folder / "x.jsonl.zst"
    short = b'{"text": "short"}\n'
    path.write_bytes(zstandard.compress(short))
    tokenizer = build_tokenizer("CharLevelTokenizer")
    options = PreprocessOptions(keys=("text",), workers=1, progress=False)

    def spoil(path: Path, generator: random.Random) -> None:
        size = generator.choice((1 << 10, 1 << 19, 17 << 20, 70 << 20))
        text = generator.choice((b"a", b" ", b"\\u0041", b'","text":"', b"[")) * size
        line = b'{"text": "' + text[:size] + generator.choice((b'"}\n', b""))
        path.write_bytes(zstandard.compress(generator.choice((line + short, short + line, line))))

    def read(path: Path) -> None:
        preprocess([path], folder / "out", tokenizer, options)

    return Target(folder, [path], read, spoil=spoil)


CRAFTED = {
    "crafted pickle": opcodes,
    "crafted archive": archives,
    "crafted tokenizer": tokenizers,
    "crafted manifest": manifests,
    "crafted suite": suites,
    "crafted special file": special_files,
    "crafted bomb": bombs,
}
