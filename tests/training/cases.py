"""A tiny model and its data, and layouts to train it in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data import IndexedDataset, IndexedDatasetWriter
from tests.processes import REPOSITORY, run_ranks

VOCABULARY = 64
WORKER = str(REPOSITORY / "tests" / "training" / "worker.py")


def write_data(
    directory: Path, *, documents: int = 60, seed: int = 0, length: int = 50, end: int | None = None
) -> str:
    """A small corpus with something to learn: each token tends to follow its predecessor."""
    generator = np.random.default_rng(seed)
    with IndexedDatasetWriter(directory / "tiny_text_document") as writer:
        for _ in range(documents):
            jumps = generator.choice([1, 2, 7], size=length, p=[0.7, 0.2, 0.1])
            document = (np.cumsum(jumps) % VOCABULARY).astype(np.uint16)
            if end is not None:
                document[-1] = end
            writer.add_document(document)
    return str(directory / "tiny_text_document")


def write_labels(data: str, masked: int) -> str:
    """Labels of a corpus without loss on the first `masked` tokens of each document."""
    tokens = IndexedDataset(data)
    with IndexedDatasetWriter(f"{data}_label", "i4") as writer:
        for document in range(len(tokens)):
            labels = tokens[document].astype(np.int32)
            labels[:masked] = -100
            writer.add_document(labels)
    return f"{data}_label"


def labelled(data: str, pack_impl: str, masked: int = 3) -> dict[str, Any]:
    """Keys that train and validate on a corpus with labels."""
    paths: dict[str, Any] = {"data_path": None, "pack_impl": pack_impl}
    for split in ("train", "valid"):
        paths[f"{split}_data_paths"] = [data]
        paths[f"{split}_label_data_paths"] = [write_labels(data, masked)]
    return paths


def tiny_config(data: str, **changes: Any) -> dict[str, Any]:
    """Two layers, four heads, sixteen tokens; SGD, so that updates are gradients."""
    config: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "seq_length": 16,
        "max_position_embeddings": 16,
        "pos_emb": "kerple_log",
        "no_weight_tying": True,
        "make_vocab_size_divisible_by": 8,
        "vocab_size": VOCABULARY,
        "data_path": data,
        "split": "80,10,10",
        "num_workers": 0,
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "train_iters": 8,
        "eval_interval": 1000,
        "eval_iters": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "betas": [0.0, 0.9]}},
        "lr_decay_style": "constant",
        "warmup": 0.0,
        "weight_decay": 0.0,
        "gradient_clipping": 0.5,
        "distributed_timeout_minutes": 2,
    }
    return {**config, **changes}


ADAM = {"type": "Adam", "params": {"lr": 0.01, "betas": [0.9, 0.95]}}

DROPOUT = {"attention_dropout": 0.2, "hidden_dropout": 0.2}


def layout(*, pp: int = 0, mp: int = 1, sp: int = 1, zero: int = 0) -> dict[str, Any]:
    return {
        "sequence_parallel_size": sp,
        "pipe_parallel_size": pp,
        "model_parallel_size": mp,
        "zero_optimization": {
            "stage": zero,
            # Small numbers, so that stage 3 really splits a tiny model.
            **({"stage3_param_persistence_threshold": 0} if zero == 3 else {}),
        },
    }


ON_TWO = {
    "dp2": layout(),
    "dp2_zero1": layout(zero=1),
    "dp2_zero2": layout(zero=2),
    "dp2_zero3": layout(zero=3),
    "mp2": layout(mp=2),
    "mp2_zero1": layout(mp=2, zero=1),
    "pp2": layout(pp=2),
    "pp2_zero1": layout(pp=2, zero=1),
}
"""The layouts of two processes."""


def precision(name: str) -> dict[str, Any]:
    return {} if name == "fp32" else {"precision": name}


def run_cases(
    cases: Mapping[str, Mapping[str, Any]], directory: Path, processes: int, timeout: float = 300
) -> dict[str, Any]:
    """All cases in one launch."""
    directory.mkdir(parents=True, exist_ok=True)
    asked, answer = directory / f"cases_{processes}.json", directory / f"results_{processes}.json"
    asked.write_text(json.dumps(cases))
    run_ranks([WORKER, str(answer), str(asked)], processes, timeout=timeout)
    return dict(json.loads(answer.read_text()))
