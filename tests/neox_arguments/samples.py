"""Small configs for the tests of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.neox_arguments import NeoXArgs

TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "train_micro_batch_size_per_gpu": 2,
    "train_iters": 10,
}


def assert_refused(values: dict[str, object], fragments: list[str]) -> None:
    """A tiny config with these values is an error that says all of this."""
    with pytest.raises(ConfigError) as caught:
        NeoXArgs.from_dict({**TINY, **values})
    for fragment in fragments:
        assert fragment in str(caught.value)


def write(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.write_text(text)
    return path
