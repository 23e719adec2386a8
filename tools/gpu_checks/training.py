"""Parts 6 and 7, training: fifty steps against the CPU's losses, kill and resume, several GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.checkpoints.safe_files import load_file
from megatron.data import IndexedDatasetWriter
from megatron.launcher.environment import free_port
from megatron.neox_arguments import NeoXArgs
from megatron.paper.run_files import read_metrics

from .findings import Finding, Settings, guarded, verdict

PART = "training"
REPOSITORY = Path(__file__).resolve().parents[2]
LAYOUTS: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "tensor parallel": {"model_parallel_size": 2},
    "pipeline": {"pipe_parallel_size": 2},
    "ZeRO 1": {"zero_optimization": {"stage": 1}},
    "ZeRO 2": {"zero_optimization": {"stage": 2}, "pipe_parallel_size": 0},
    "ZeRO 3": {"zero_optimization": {"stage": 3}, "pipe_parallel_size": 0},
}


def check(settings: Settings) -> list[Finding]:
    """small_bf16.yml on a text made here, with a smaller batch so that a CPU can follow."""
    runs = _Runs(settings)
    return [
        guarded(PART, "fifty steps against the CPU", partial(_against_cpu, runs)),
        guarded(PART, "kill and resume", partial(_kill_and_resume, runs)),
        guarded(PART, "async_save", partial(_background_save, runs)),
        *_several(runs),
    ]


def write_licence_corpus(directory: Path) -> Path:
    """The licence as bytes, a document a paragraph: text that every checkout has, unchanged."""
    prefix = directory / "licence_text_document"
    with IndexedDatasetWriter(prefix) as writer:
        for paragraph in (REPOSITORY / "LICENSE").read_bytes().split(b"\n\n"):
            if paragraph.strip():
                writer.add_document(np.frombuffer(paragraph + b"\n\n", np.uint8).astype(np.uint16))
    return prefix


class _Runs:
    """Starts train.py with the check's config, changed a little, in a directory of its own."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.scratch = settings, settings.scratch
        self.steps = 4 if settings.quick else 50
        self.data = write_licence_corpus(self.scratch)

    def config(self, name: str, changes: Mapping[str, Any]) -> Path:
        base = NeoXArgs.from_files([str(REPOSITORY / "configs" / "small_bf16.yml")]).to_dict()
        small = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64}
        own = {
            "data_path": str(self.data),
            "tokenizer_type": "CharLevelTokenizer",
            "data_cache_dir": str(self.scratch / "cache"),
            "save": str(self.scratch / name),
            "train_iters": self.steps,
            "lr_decay_iters": self.steps,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": None,
            "train_batch_size": 4,
            "split": "100,0,0",
            "log_interval": 1,
            "eval_interval": 1000,
            "eval_iters": 0,
            "checkpoint_factor": max(2, self.steps // 5),
        }
        merged = {**base, **(small if self.settings.quick else {}), **own, **changes}
        path = self.scratch / f"{name}.yml"
        path.write_text(NeoXArgs.from_dict(merged).to_yaml())
        return path

    def start(self, name: str, changes: Mapping[str, Any], device: str, ranks: int = 1) -> Any:
        config, port = self.config(name, changes), free_port()
        started = []
        for rank in range(ranks):
            environment = {
                **{k: v for k, v in os.environ.items() if not k.startswith("SLURM_")},
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            if device == "cpu":
                environment["DS_ACCELERATOR"] = "cpu"
            started.append(
                subprocess.Popen(
                    [sys.executable, str(REPOSITORY / "train.py"), str(config)],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        return started

    def run(
        self, name: str, changes: Mapping[str, Any], device: str, ranks: int = 1
    ) -> list[dict[str, Any]]:
        """The metrics of a finished run; an error with its last line if it failed."""
        for process in self.start(name, changes, device, ranks):
            output, _ = process.communicate(timeout=3600)
            if process.returncode:
                lines = [line for line in output.splitlines() if line.strip()] or ["no output"]
                raise RuntimeError(f"{name} ended with {process.returncode}: {lines[-1]}")
        return self.metrics(name)

    def metrics(self, name: str) -> list[dict[str, Any]]:
        entries = read_metrics(self.scratch / name / "metrics.jsonl")
        return [entry for entry in entries if "loss" in entry]

    @property
    def here(self) -> str:
        return self.settings.device.type


def _losses(metrics: list[dict[str, Any]]) -> list[float]:
    return [entry["loss"] for entry in metrics]


def _against_cpu(runs: _Runs) -> Finding:
    here = runs.run("here", {}, runs.here)
    there = runs.run("cpu", {}, "cpu")
    pairs = list(zip(_losses(here), _losses(there), strict=True))
    error = max(abs(a - b) / b for a, b in pairs)
    known = {key: here[-1].get(key) for key in ("tokens_per_second", "mfu", "memory_gb")}
    detail = f"{len(pairs)} steps, losses within {error:.1e} (at most 2e-2)"
    return Finding(PART, "steps against the CPU", verdict(error < 2e-2), detail, known)


def _kill_and_resume(runs: _Runs) -> Finding:
    """kill -9 after the first checkpoint; the resumed losses equal the uninterrupted run's."""
    process = runs.start("killed", {}, runs.here)[0]
    end = time.monotonic() + 600
    while not (runs.scratch / "killed" / "latest").exists() and time.monotonic() < end:
        if process.poll() is not None:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    resumed = runs.run("killed", {"load": str(runs.scratch / "killed")}, runs.here)
    same = _losses(resumed) == _losses(runs.metrics("here"))
    return Finding(PART, "kill and resume", verdict(same), "losses bit for bit")


def _background_save(runs: _Runs) -> Finding:
    """Copies through pinned memory while the next steps run: losses and last files are the same."""
    found = _losses(runs.run("background", {"async_save": True}, runs.here))
    folders = [runs.scratch / name / f"global_step{runs.steps}" for name in ("here", "background")]
    one, other = (_weights(folder) for folder in folders)
    equal = one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    same = found == _losses(runs.metrics("here")) and bool(one) and equal
    return Finding(PART, "async_save", verdict(same), f"losses and {len(one)} weights to the bit")


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint, whole or layer by layer."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*model_states.pt")):
        content = load_file(path)
        weights = content.get("module", content) or {}
        found |= {f"{path.name} {name}": value for name, value in weights.items()}
    return found


def _several(runs: _Runs) -> list[Finding]:
    """Two processes agree with one under every layout."""
    count = torch.cuda.device_count() if runs.settings.on_gpu else 2
    layouts = dict(list(LAYOUTS.items())[:2]) if runs.settings.quick else LAYOUTS
    if count < 2:
        return [Finding(PART, f"two GPUs, {n}", "not run", "one GPU here") for n in layouts]
    return [
        guarded(PART, f"two processes, {name}", partial(_layout, runs, name, changes))
        for name, changes in layouts.items()
    ]


def _layout(runs: _Runs, name: str, changes: Mapping[str, Any]) -> Finding:
    found = _losses(runs.run(name.replace(" ", "_"), changes, runs.here, ranks=2))
    expected = _losses(runs.metrics("here"))
    error = max(abs(a - b) / b for a, b in zip(found, expected, strict=True))
    status = verdict(error < 2e-2)
    return Finding(PART, f"two processes, {name}", status, f"losses within {error:.1e}")
