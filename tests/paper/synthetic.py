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

from megatron.data.recall_text import RECALL_KINDS
from megatron.paper.run_files import mark_done, prepare_run
from megatron.paper.suite import Run, Step

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


def result_file(run: Run, step: Step, results: object) -> dict[str, object]:
    """A result as evaluate.py writes it under the suite's settings."""
    config = run.config
    lengths = [step.length] if step.length else config["eval_lengths"]
    settings = {
        "data": [
            {
                "split": split,
                "prefix": config["data_path"],
                "share": config.get("split"),
                "bytes": None,
            }
            for split in ("valid", "test")
        ],
        "protocol": config.get("eval_protocol"),
        "num_sequences": config.get("eval_num_sequences"),
        "data_seed": run.seed,
        "window": step.window,
        "lengths": lengths,
        "model": {},
    }
    if step.task == "positionwise":
        settings["buckets"] = ["log", None]
    return {
        "format": 2,
        "task": step.task,
        "checkpoint": f"global_step{config['train_iters']}",
        "iteration": config["train_iters"],
        "config_hash": "0" * 16,
        "pos_emb": run.method,
        "seed": run.seed,
        "data_seed": run.seed,
        "protocol": config.get("eval_protocol"),
        "train_length": run.train_length,
        "parameters": 1000,
        "window": step.window,
        "settings": settings,
        "checkpoint_id": None,
        "version": "0.1.0",
        "results": results,
        "errors": [],
    }


def step_result(run: Run, step: Step) -> dict[str, object]:
    if step.task == "positionwise":
        assert step.length is not None
        return result_file(run, step, positions(run, step.length, step.window))
    if step.task == "recall":
        return recall_result(run, step)
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
            for length in run.config["eval_lengths"]
        ]
        for split in run.splits
    }
    return result_file(run, step, entries)


def recall_result(run: Run, step: Step) -> dict[str, object]:
    """Half as much with every doubling, a little different by seed."""
    lengths = run.config["eval_lengths"]
    content = result_file(run, step, {})
    settings = {"lengths": lengths, "samples": run.config["recall_samples"], "seed": run.seed}
    content["settings"] = {**settings, "window": None}
    grid = [
        {"kind": kind, "length": n, "accuracy": 0.9 * run.train_length / n + 0.01 * (run.seed % 5)}
        for kind in RECALL_KINDS
        for n in lengths
    ]
    return {**content, "results": {"grid": grid}}


def result_name(run: Run, step: Step) -> str:
    if step.length is None:
        return f"step{run.config['train_iters']}_{step.task}.json"
    return f"length{step.length}_{step.task}{f'_window{step.window}' if step.window else ''}.json"


def write_results(directory: Path, run: Run) -> None:
    (directory / "results").mkdir(parents=True, exist_ok=True)
    for step in run.evaluations:
        path = directory / "results" / result_name(run, step)
        path.write_text(json.dumps(step_result(run, step)), encoding="utf-8")


def write_run(run: Run) -> Path:
    prepare_run(run)
    write_results(run.directory, run)
    _write_metrics(run.directory, run)
    for step in run.steps:
        mark_done(run, step, 12.0)
    return run.directory


def positions(run: Run, length: int, window: int | None) -> dict[str, object]:
    edges = [0, *(2**k for k in range(1, int(math.log2(length)) + 1))]
    buckets = []
    for start, end in pairwise(edges):
        reach = min(end, window) if window else end
        loss = loss_at(run, max(reach, run.train_length)) + 1.5 / math.sqrt(min(end, reach))
        buckets.append(
            {"start": start, "end": end, "loss": loss, "ppl": math.exp(loss), "tokens": end - start}
        )
    return {split: {"length": length, "buckets": buckets, "window": window} for split in run.splits}


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
