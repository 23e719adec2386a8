"""What is spoilt, and who reads it afterwards: one target per kind of file.

Each target makes honest files in a folder of its own. A case spoils one of them, asks the reader,
and puts the file back. The only answers allowed are a result and an error of megatron/errors.py.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from megatron.commands.plot_run import read_run
from megatron.data import IndexedDataset, IndexedDatasetWriter, build_train_valid_test_datasets
from megatron.data.index_cache import MAGIC, PREAMBLE
from megatron.data.preprocess import PreprocessOptions, preprocess
from megatron.evaluation.results_schema import read_result
from megatron.launcher.planning import read_hostfile
from megatron.neox_arguments import NeoXArgs
from megatron.paper.plan import plan_text
from megatron.paper.report import collect_results
from megatron.paper.result_fit import done_steps
from megatron.paper.run_archive import pack_runs
from megatron.paper.run_files import (
    RunState,
    State,
    read_history,
    read_metrics,
    record_command,
    training_differences,
    write_state,
)
from megatron.paper.slurm import ClusterOptions
from megatron.paper.status import logs_text, status_text
from megatron.paper.suite import load_suite
from megatron.paper.suite_file import SUITE_DIRECTORY
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.vocabularies import MERGES, VOCABULARY, train_byte_pairs, write_gpt2_files
from megatron.training.metrics import JsonLines
from tests.conftest import REPOSITORY
from tests.fuzz import checkpoint_targets as checkpoints
from tests.fuzz.crafted_targets import CRAFTED
from tests.fuzz.target import Target
from tests.paper.synthetic import write_run


def configs(folder: Path) -> Target:
    files = [
        Path(shutil.copy(REPOSITORY / "configs" / name, folder))
        for name in ("small_bf16.yml", "local_setup.yml", "XL.yml")
    ]

    def read(path: Path) -> None:
        setup = files[1] if path != files[1] else files[0]
        NeoXArgs.from_files([path, setup])

    return Target(folder, files, read, text=True)


def _documents(folder: Path) -> Path:
    with IndexedDatasetWriter(folder / "d") as writer:
        for number in range(30):
            writer.add_document([number % 7] * (5 + number))
    return folder / "d"


def index_file(folder: Path) -> Target:
    """Token files of another program: no checksums."""
    prefix = _documents(folder)

    def read(path: Path) -> None:
        dataset = IndexedDataset(prefix)
        for number in range(0, len(dataset), max(len(dataset) // 4, 1)):
            dataset[number].sum()

    return Target(folder, [folder / "d.idx", folder / "d.bin"], read)


def prepared_data(folder: Path) -> Target:
    """Token files of ours: the sums beside them find what the numbers do not show."""
    text = folder / "text.jsonl"
    lines = [json.dumps({"text": f"document {n} " * 9}) for n in range(20)]
    text.write_text("\n".join(lines))
    options = PreprocessOptions(keys=("text",), workers=1, progress=False)
    outcome = preprocess([text], folder / "d", build_tokenizer("CharLevelTokenizer"), options)
    prefix = outcome.prefixes[0]

    def read(path: Path) -> object:
        dataset = IndexedDataset(prefix, warmup=True)
        return [dataset[number].tolist() for number in range(len(dataset))]

    files = [prefix.with_name(f"{prefix.name}.{kind}") for kind in ("idx", "bin", "json")]
    return Target(folder, files, read, must_be_honest=True)


def index_cache(folder: Path) -> Target:
    """A cache is never an error: whatever lies there, the samples are the right ones."""
    return _index_cache(folder, _sum_the_header)


def forged_cache(folder: Path) -> Target:
    """With every checksum made right, other samples may come of it, but nothing else."""
    return _index_cache(folder, _sum_everything)


def _index_cache(folder: Path, mend: Callable[[Path], None]) -> Target:
    prefix = _documents(folder)
    logging.getLogger("megatron.data.index_cache").setLevel(logging.ERROR)
    forged = mend is _sum_everything

    def samples() -> list[Any]:
        train, _, _ = build_train_valid_test_datasets(
            prefix, "1", (8, 0, 0), 6, cache_dir=folder / "cache"
        )
        assert train is not None
        return [train[n]["text"].tolist() for n in range(len(train))]

    right = samples()

    def read(path: Path) -> object:
        found = samples()
        if not forged:
            assert found == right, "other samples from a spoilt cache"
        assert [len(sample) for sample in found] == [len(sample) for sample in right]
        return found

    files = sorted((folder / "cache").glob("*.index"))
    return Target(folder, files, read, mend=mend, must_be_honest=True)


def _sum_the_header(path: Path) -> None:
    """A right checksum of the header: what lies behind it is what is tried."""
    data = path.read_bytes()
    if len(data) > PREAMBLE.size:
        _, length, _ = PREAMBLE.unpack(data[: PREAMBLE.size])
        header = data[PREAMBLE.size :][: min(length, len(data))]
        preamble = PREAMBLE.pack(MAGIC, len(header), zlib.crc32(header))
        path.write_bytes(preamble + data[PREAMBLE.size :])


def _sum_everything(path: Path) -> None:
    """Right checksums of all arrays that the header describes, and the right size."""
    data = path.read_bytes()
    if len(data) < PREAMBLE.size:
        return
    _, length, _ = PREAMBLE.unpack(data[: PREAMBLE.size])
    body = data[PREAMBLE.size :]
    try:
        content = json.loads(body[:length])
        content["size"] = len(data)
        for entry in content["arrays"]:
            start, stop = entry["offset"], entry["offset"]
            stop += entry["length"] * np.dtype(entry["dtype"]).itemsize
            entry["crc32"] = zlib.crc32(data[start:stop])
        header = json.dumps(content, sort_keys=True).encode().ljust(length)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return _sum_the_header(path)
    preamble = PREAMBLE.pack(MAGIC, len(header), zlib.crc32(header))
    path.write_bytes(preamble + header + body[length:])


def hostfile(folder: Path) -> Target:
    path = folder / "hostfile"
    path.write_text(
        "".join(f"worker-{n} slots=8\n" for n in range(5)) + "# end\n10.0.0.1 slots=1\n"
    )
    return Target(folder, [path], read_hostfile, text=True)


def suite(folder: Path) -> Target:
    files = [Path(shutil.copy(path, folder)) for path in sorted(SUITE_DIRECTORY.glob("*.yml"))]

    def read(path: Path) -> None:
        plan_text(load_suite(str(path)))

    return Target(folder, files, read, text=True)


def cluster_file(folder: Path) -> Target:
    path = folder / "cluster.yml"
    path.write_text(
        "account: a\npartition: gpu\ntime: 24:00:00\ngrace: 300\nsetup: [module load x]\n"
    )

    def read(path: Path) -> None:
        ClusterOptions.from_file(str(path), {"gpu_type": "a100"})

    return Target(folder, [path], read, text=True)


def suite_run(folder: Path) -> Target:
    """What a suite keeps in its runs' folders; a broken file is told or left out."""
    root = folder / "runs"
    whole = load_suite("smoke", ["smoke.stdlib.kerple_log.1235"], runs_root=root)
    directory = write_run(whole.runs[0])
    write_state(directory, RunState(State.DONE))
    record_command(root / whole.name, "run --suite smoke", 3.0, 0)
    jobs = root / whole.name / "slurm" / "jobs.json"
    jobs.parent.mkdir()
    jobs.write_text(json.dumps({"train": {"job": "7", "runs": [whole.runs[0].name]}}))
    files = sorted(path for path in (root / whole.name).rglob("*") if path.is_file())
    read_only = ("history.jsonl", "jobs.json")

    def read(path: Path) -> None:
        status_text(whole).encode()
        logs_text(whole, whole.runs[0].name, 5).encode()
        read_history(root / whole.name)
        collect_results(whole)
        done_steps(whole.runs[0])
        if path.name not in read_only:
            training_differences(replace(whole.runs[0], seed=1))
            pack_runs(whole, folder / "kept.tar.gz")

    return Target(folder, files, read, text=True)


def tokenizer_files(folder: Path) -> Target:
    """GPT-2's two files, Hugging Face's one, and tiktoken's."""
    library = train_byte_pairs(
        iter([f"some text {n} " * 5 for n in range(50)]), 300, progress=False
    )
    library.save(str(folder / "tokenizer.json"))
    write_gpt2_files(library, folder)
    ranks = [f"{b64encode(bytes([n])).decode()} {n}\n" for n in range(256)]
    (folder / "toy.tiktoken").write_text("".join(ranks))
    kinds = {"tokenizer.json": "HFTokenizer", "toy.tiktoken": "TiktokenTokenizer"}

    def read(path: Path) -> None:
        kind = kinds.get(path.name)
        if kind is None:
            tokenizer = build_tokenizer(
                "GPT2BPETokenizer",
                vocab_file=folder / VOCABULARY,
                merge_file=folder / MERGES,
            )
        else:
            tokenizer = build_tokenizer(kind, vocab_file=path)
        tokenizer.detokenize(tokenizer.tokenize("some text 7, other text"))
        assert 0 <= tokenizer.eod < tokenizer.vocab_size

    files = [folder / name for name in ("tokenizer.json", VOCABULARY, MERGES, "toy.tiktoken")]
    return Target(folder, files, read, text=True)


def results(folder: Path) -> Target:
    entry = {"length": 16, "loss": 2.0, "ppl": 7.4, "tokens": 64, "sequences": 4}
    content = {
        "format": 1,
        "pos_emb": "kerple_log",
        "seed": 1,
        "task": "extrapolation",
        "iteration": 5,
        "train_length": 16,
        "results": {"valid": [entry], "test": [entry]},
    }
    path = folder / "step5_extrapolation.json"
    path.write_text(json.dumps(content, indent=1))
    return Target(folder, [path], read_result, text=True)


def metrics(folder: Path) -> Target:
    path = folder / "metrics.jsonl"
    lines = [
        {"step": n, "loss": 2.0, "lr": 1e-3, "kernel": {"r1": [1.0, 2.0]}} for n in range(1, 8)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def read(path: Path) -> None:
        spoilt = path.read_bytes()
        list(read_metrics(path))
        list(read_metrics(path, 100))
        JsonLines(path, 4).close()
        path.write_bytes(spoilt)
        read_run(folder)

    return Target(folder, [path], read, text=True)


def text_input(folder: Path) -> Target:
    lines = b"".join(json.dumps({"text": f"document {n} " * 9}).encode() + b"\n" for n in range(20))
    plain, packed = folder / "a.jsonl", folder / "b.jsonl.zst"
    plain.write_bytes(lines)
    packed.write_bytes(zstandard.compress(lines) + zstandard.compress(lines))
    tokenizer = build_tokenizer("CharLevelTokenizer")
    options = PreprocessOptions(keys=("text",), workers=1, progress=False)

    def read(path: Path) -> None:
        preprocess([path], folder / "out", tokenizer, options)

    return Target(folder, [plain, packed], read)


TARGETS: dict[str, Callable[[Path], Target]] = {
    "config": configs,
    "checkpoint, one file": checkpoints.native,
    "checkpoint, layer files": checkpoints.layers,
    "checkpoint, GPT-NeoX": checkpoints.neox,
    "checkpoint, official": checkpoints.official,
    "checkpoint, ZeRO 3": checkpoints.zero3,
    "checkpoint, universal": checkpoints.universal,
    "run files": checkpoints.run_files,
    "Hugging Face": checkpoints.hugging_face,
    "index file": index_file,
    "prepared data": prepared_data,
    "index cache": index_cache,
    "index cache, forged": forged_cache,
    "hostfile": hostfile,
    "suite": suite,
    "suite's runs": suite_run,
    "cluster file": cluster_file,
    "results": results,
    "metrics": metrics,
    "tokenizer": tokenizer_files,
    "jsonl and zst": text_input,
    **CRAFTED,
}


COSTLY = {
    "checkpoint, universal": 1,
    "crafted bomb": 1,
    **dict.fromkeys(
        (
            "checkpoint, one file",
            "checkpoint, layer files",
            "checkpoint, GPT-NeoX",
            "checkpoint, official",
            "checkpoint, ZeRO 3",
            "run files",
            "Hugging Face",
            "index cache",
            "index cache, forged",
            "suite",
            "suite's runs",
            "crafted tokenizer",
            "crafted suite",
            "crafted special file",
        ),
        2,
    ),
}
"""How many cases of a cycle are of the kinds that take long; of the others it is CHEAP."""
CHEAP = 40


def cycle(names: list[str] | None = None) -> list[str]:
    """The kinds of the first cases, which then repeat: few cases of those that take long."""
    chosen = [name for name in TARGETS if names is None or name in names]
    kinds = [name for name in chosen for _ in range(COSTLY.get(name, CHEAP))]
    random.Random(0).shuffle(kinds)
    return kinds


def build_targets(root: Path, names: list[str] | None = None) -> Iterator[tuple[str, Target]]:
    """The targets, each in a folder of its own."""
    for number, (name, build) in enumerate(TARGETS.items()):
        if names is None or name in names:
            folder = root / f"{number:02d}"
            folder.mkdir()
            yield name, build(folder)
