"""What is spoilt, and who reads it afterwards: one target per kind of file.

Each target makes honest files in a folder of its own. A case spoils one of them, asks the reader,
and puts the file back. The only answers allowed are a result and an error of megatron/errors.py.
"""

from __future__ import annotations

import json
import logging
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import zstandard

from megatron.checkpoints import read_checkpoint
from megatron.checkpoints.checksums import CHECKSUMS, write_checksums
from megatron.checkpoints.hf.folder import write_hf
from megatron.checkpoints.inspection import kernel_of
from megatron.checkpoints.universal import parameter_folders, read_progress, read_states
from megatron.checkpoints.writing import write_native, write_neox
from megatron.commands.plot_run import read_run
from megatron.data import IndexedDataset, IndexedDatasetWriter, build_train_valid_test_datasets
from megatron.data.index_cache import MAGIC, PREAMBLE
from megatron.data.preprocess import PreprocessOptions, preprocess
from megatron.evaluation.results_schema import read_result
from megatron.launcher.planning import read_hostfile
from megatron.neox_arguments import NeoXArgs
from megatron.paper.run_results import read_metrics
from megatron.paper.suite import load_suite
from megatron.paper.suite_file import SUITE_DIRECTORY
from megatron.tokenizer import build_tokenizer
from megatron.training.metrics import JsonLines
from megatron.training.run_manifest import finished_at
from tests.checkpoints.small_models import at_rest, random_model, small_args
from tests.conftest import FIXTURES, REPOSITORY

Change = Callable[[bytes], bytes]


@dataclass
class Target:
    """Files of one kind and their reader."""

    folder: Path
    files: list[Path]
    read: Callable[[Path], object]
    """Gets the spoilt file."""
    text: bool = False
    mend: Callable[[Path], None] | None = None
    """Makes checksums right again after a file was spoilt, as a forger would."""
    honest: dict[Path, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.honest = {path: path.read_bytes() for path in self.files}


def _read_and_use(folder: Path) -> None:
    checkpoint = read_checkpoint(folder)
    kernel_of(checkpoint, longest=64)


def _checkpoint(folder: Path, step: Path, *, sums: bool) -> Target:
    """All files of a checkpoint, with checksums made right again or taken away."""
    files = sorted(p for p in step.rglob("*") if p.is_file() and p.name != CHECKSUMS)
    if not sums:
        (step / CHECKSUMS).unlink(missing_ok=True)
    return Target(
        folder,
        files,
        lambda path: _read_and_use(folder),
        mend=(lambda path: write_checksums(step)) if sums else None,
    )


def configs(folder: Path) -> Target:
    files = [
        Path(shutil.copy(REPOSITORY / "configs" / name, folder))
        for name in ("small_bf16.yml", "local_setup.yml", "XL.yml")
    ]

    def read(path: Path) -> None:
        setup = files[1] if path != files[1] else files[0]
        NeoXArgs.from_files([path, setup])

    return Target(folder, files, read, text=True)


def native(folder: Path) -> Target:
    args = small_args(pos_emb="kerple_log")
    write_native(at_rest(random_model(args), args), folder)
    return _checkpoint(folder, folder / "global_step5", sums=True)


def layers(folder: Path) -> Target:
    args = small_args(pos_emb="rpe", no_weight_tying=True)
    write_native(at_rest(random_model(args), args), folder, mp=2, pp=1)
    return _checkpoint(folder, folder / "global_step5", sums=False)


def neox(folder: Path) -> Target:
    args = small_args(pos_emb="kerple_power")
    write_neox(at_rest(random_model(args), args), folder, mp=2)
    return _checkpoint(folder, folder / "global_step5", sums=True)


def official(folder: Path) -> Target:
    shutil.copytree(FIXTURES / "official_kerple_power_mp2", folder, dirs_exist_ok=True)
    return _checkpoint(folder, folder / "global_step7", sums=False)


def zero3(folder: Path) -> Target:
    """Three ranks' pieces of every parameter, as DeepSpeed's stage 3 lays them."""
    args = small_args(pos_emb="kerple_log", no_weight_tying=True)
    model = random_model(args)
    step = write_native(at_rest(model, args), folder)
    (step / "mp_rank_00_model_states.pt").unlink()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    ranks = 3
    for rank in range(ranks):
        pieces = []
        for values in parameters.values():
            share = -(-values.numel() // ranks)
            padded = torch.zeros(share * ranks)
            padded[: values.numel()] = values.flatten()
            pieces.append(padded[rank * share : (rank + 1) * share])
        optimizer = {"fp32_flat_groups": [torch.cat(pieces)], "partition_count": ranks}
        prefix = step / f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": optimizer}, f"{prefix}_optim_states.pt")
        shapes = [{name: values.shape for name, values in parameters.items()}]
        torch.save({"param_shapes": shapes, "module": {}}, f"{prefix}_model_states.pt")
    write_checksums(step)
    return _checkpoint(folder, step, sums=True)


def universal(folder: Path) -> Target:
    """One folder per parameter, as the reshard tool writes them."""
    args = small_args(pos_emb="kerple_log", no_weight_tying=True)
    resting = at_rest(random_model(args), args)
    step = write_native(resting, folder)
    for name, weight in resting.weights.items():
        place = step / "zero" / name
        place.mkdir(parents=True)
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            torch.save({"param": weight, "cat_dim": 0}, place / f"{key}.pt")
        torch.save(torch.tensor(5.0), place / "step.pt")
    torch.save({"param_groups": []}, step / "zero" / "optimizer_state.pt")
    progress = {"iteration": 5, "consumed_samples": 20, "schedule": {"steps": 5}}
    progress |= {"skipped_steps": 0, "vocab_size": 64}
    (step / "universal.json").write_text(json.dumps({"format": 1, **progress}))
    write_checksums(step)

    def read(path: Path) -> None:
        _read_and_use(folder)
        read_progress(step)
        for place in list(parameter_folders(step).values())[:3]:
            read_states(place, optimizer=True)

    target = _checkpoint(folder, step, sums=True)
    target.read = read
    return target


def run_files(folder: Path) -> Target:
    """What lies beside the weights: latest, checksums, the manifest."""
    args = small_args(pos_emb="kerple_log")
    step = write_native(at_rest(random_model(args), args), folder)
    (folder / "manifest.json").write_text(
        json.dumps({"history": [{"reason": "finished", "at_step": 5}], "data": {}})
    )

    def read(path: Path) -> None:
        finished_at(folder)
        read_checkpoint(folder)

    files = [folder / "latest", step / CHECKSUMS, folder / "manifest.json"]
    return Target(folder, files, read, text=True)


def hugging_face(folder: Path) -> Target:
    args = small_args(pos_emb="kerple_log")
    write_hf(at_rest(random_model(args), args), folder)
    names = [*folder.glob("*.safetensors"), folder / "config.json", folder / "tokenizer.json"]
    return Target(
        folder,
        [name for name in names if name.is_file()],
        lambda path: _read_and_use(folder),
        mend=lambda path: write_checksums(folder, only=("*.safetensors", "config.json")),
    )


def _documents(folder: Path) -> Path:
    with IndexedDatasetWriter(folder / "d") as writer:
        for number in range(30):
            writer.add_document([number % 7] * (5 + number))
    return folder / "d"


def index_file(folder: Path) -> Target:
    prefix = _documents(folder)

    def read(path: Path) -> None:
        dataset = IndexedDataset(prefix)
        for number in range(0, len(dataset), max(len(dataset) // 4, 1)):
            dataset[number].sum()

    return Target(folder, [folder / "d.idx", folder / "d.bin"], read)


def index_cache(folder: Path) -> Target:
    """A cache is never an error: whatever lies there, the samples are the right ones."""
    prefix = _documents(folder)
    logging.getLogger("megatron.data.index_cache").setLevel(logging.ERROR)

    def samples() -> list[Any]:
        train, _, _ = build_train_valid_test_datasets(
            prefix, "1", (8, 0, 0), 6, cache_dir=folder / "cache"
        )
        assert train is not None
        return [train[n]["text"].tolist() for n in range(len(train))]

    right = samples()

    def read(path: Path) -> None:
        assert samples() == right, "other samples from a spoilt cache"

    def mend(path: Path) -> None:
        """A right checksum of the header: what lies behind it is what is tried."""
        data = path.read_bytes()
        if len(data) > PREAMBLE.size:
            _, length, _ = PREAMBLE.unpack(data[: PREAMBLE.size])
            header = data[PREAMBLE.size :][: min(length, len(data))]
            preamble = PREAMBLE.pack(MAGIC, len(header), zlib.crc32(header))
            path.write_bytes(preamble + data[PREAMBLE.size :])

    return Target(folder, sorted((folder / "cache").glob("*.index")), read, mend=mend)


def hostfile(folder: Path) -> Target:
    path = folder / "hostfile"
    path.write_text(
        "".join(f"worker-{n} slots=8\n" for n in range(5)) + "# end\n10.0.0.1 slots=1\n"
    )
    return Target(folder, [path], read_hostfile, text=True)


def suite(folder: Path) -> Target:
    files = [Path(shutil.copy(path, folder)) for path in sorted(SUITE_DIRECTORY.glob("*.yml"))]

    def read(path: Path) -> None:
        load_suite(str(path))

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
    options = PreprocessOptions(keys=["text"], workers=1, progress=False)

    def read(path: Path) -> None:
        preprocess([path], folder / "out", tokenizer, options)

    return Target(folder, [plain, packed], read)


TARGETS: dict[str, Callable[[Path], Target]] = {
    "config": configs,
    "checkpoint, one file": native,
    "checkpoint, layer files": layers,
    "checkpoint, GPT-NeoX": neox,
    "checkpoint, official": official,
    "checkpoint, ZeRO 3": zero3,
    "checkpoint, universal": universal,
    "run files": run_files,
    "Hugging Face": hugging_face,
    "index file": index_file,
    "index cache": index_cache,
    "hostfile": hostfile,
    "suite": suite,
    "results": results,
    "metrics": metrics,
    "jsonl and zst": text_input,
}


def build_targets(root: Path, names: list[str] | None = None) -> Iterator[tuple[str, Target]]:
    """The targets, each in a folder of its own."""
    for number, (name, build) in enumerate(TARGETS.items()):
        if names is None or name in names:
            folder = root / f"{number:02d}"
            folder.mkdir()
            yield name, build(folder)
