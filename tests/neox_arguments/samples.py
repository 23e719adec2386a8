"""Small configs for the tests of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "train_micro_batch_size_per_gpu": 2,
    "train_iters": 10,
}


def write(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.write_text(text)
    return path
