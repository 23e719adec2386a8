"""Run directories with made-up numbers in the contract's format, to test the report.

The numbers follow the shape of the paper's results and are marked as synthetic by living in
temporary directories only.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np

from megatron.paper.run_files import expected_steps, mark_done, prepare_run
from megatron.paper.suite import Run, Suite

GROWTH = {
    "kerple_log": -0.06,
    "kerple_log3": -0.061,
    "kerple_power": -0.055,
    "kerple_bias_wht": -0.05,
    "alibi": -0.02,
    "rpe": 0.02,
    "rotary": 0.45,
    "sinusoidal": 1.1,
    "gauss_wht1": 0.05,
    "gauss_wht2": -0.03,
    "gauss_bias2": 0.8,
    "gauss_bias3": 0.9,
}
START = {"rpe": -0.01, "sinusoidal": 0.25, "alibi": 0.006, "gauss_wht1": 0.4}
HEAD_PARAMETERS = {"kerple_log": 2, "kerple_log3": 3, "kerple_power": 2, "kerple_bias_wht": 4}


def loss_at(run: Run, length: int) -> float:
    noise = np.random.RandomState(run.seed + length).normal() * 0.004
    base = 1.9 if run.data == "stdlib" else 2.3
    seed_shift = 0.02 * (run.seed - 1236)
    octaves = math.log2(length / run.train_length)
    start = START.get(run.method, 0.0)
    bend = 0.02 * octaves**2 if run.method == "rpe" else 0.0
    return base + seed_shift + start + GROWTH[run.method] * octaves + bend + noise


def result_file(run: Run, task: str, results: object) -> dict[str, object]:
    return {
        "format": 1,
        "task": task,
        "checkpoint": "global_step20",
        "iteration": 20,
        "config_hash": "0" * 16,
        "pos_emb": run.method,
        "seed": run.seed,
        "protocol": "fixed_tokens",
        "train_length": run.train_length,
        "parameters": 1000,
        "results": results,
    }


def write_run(suite: Suite, root: Path, run: Run) -> Path:
    directory = suite.run_directory(root, run)
    prepare_run(directory, suite.name, run)
    (directory / "results").mkdir(parents=True, exist_ok=True)
    lengths = run.config["eval_lengths"]
    entries = {
        split: [
            {
                "length": length,
                "loss": loss_at(run, length),
                "ppl": math.exp(loss_at(run, length)),
                "stderr": 0.01,
                "tokens": 4096,
                "sequences": 4096 // length,
            }
            for length in lengths
        ]
        for split in suite.splits
    }
    _dump(directory, "step20_extrapolation", result_file(run, "extrapolation", entries))
    for step in run.evaluations:
        if step.task == "positionwise":
            assert step.length is not None
            content = positions(run, suite, step.length, step.window)
            _dump(directory, step.name, result_file(run, "positionwise", content))
    _write_metrics(directory, run)
    for name, value in expected_steps(run).items():
        mark_done(directory, name, value, 12.0)
    return directory


def positions(run: Run, suite: Suite, length: int, window: int | None) -> dict[str, object]:
    edges = [0, *(2**k for k in range(1, int(math.log2(length)) + 1))]
    buckets = []
    for start, end in pairwise(edges):
        reach = min(end, window) if window else end
        loss = loss_at(run, max(reach, run.train_length)) + 1.5 / math.sqrt(min(end, reach))
        buckets.append(
            {"start": start, "end": end, "loss": loss, "ppl": math.exp(loss), "tokens": end - start}
        )
    return {
        split: {"length": length, "buckets": buckets, "window": window} for split in suite.splits
    }


def _dump(directory: Path, name: str, content: object) -> None:
    path = directory / "results" / f"{name}.json"
    path.write_text(json.dumps(content), encoding="utf-8")


def _write_metrics(directory: Path, run: Run) -> None:
    heads = int(run.config["num_attention_heads"])
    random = np.random.RandomState(run.seed)
    lines = []
    for step in range(1, 201):
        loss = 2.0 + 3.0 * math.exp(-step / 40) + random.normal() * 0.03
        seconds = 0.1 + 0.002 * len(run.method)
        entry: dict[str, object] = {
            "step": step,
            "loss": loss,
            "lr": 1e-3,
            "grad_norm": 1.0,
            "tokens_per_second": 20000.0,
            "step_seconds": seconds,
            "time": 0.0,
        }
        lines.append(json.dumps(entry))
    count = HEAD_PARAMETERS.get(run.method, 0)
    if count:
        values = {
            f"r{i + 1}": np.exp(random.normal(size=heads) * 0.8 - 0.3).clip(0.05, 1.9).tolist()
            for i in range(count)
        }
        lines.append(json.dumps({"step": 200, "kernel": values, "effective_length": [10] * heads}))
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
