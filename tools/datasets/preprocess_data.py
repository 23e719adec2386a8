#!/usr/bin/env python
"""Where GPT-NeoX has it: tools/preprocess_data.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from runpy import run_path


def main(input_args: Sequence[str] | None = None) -> int:
    """GPT-NeoX's function of this name."""
    from megatron.commands.data_tools import preprocess_data

    return preprocess_data(input_args)


if __name__ == "__main__":
    beside = Path(__file__).resolve().parents[1] / "_start.py"
    run_path(str(beside))["start"]("preprocess_data")
