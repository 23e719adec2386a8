#!/usr/bin/env python
"""GPT-NeoX's tool: how many tokens each dataset (a path without .bin and .idx) holds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from runpy import run_path


def main(argv: Sequence[str] | None = None) -> int:
    from megatron.data.indexed_dataset import make_dataset
    from megatron.errors import DataError

    paths = list(sys.argv[1:] if argv is None else argv)
    if not paths:
        raise DataError("dataset_token_count.py DATASET...: no dataset is named")
    if paths[0] in ("-h", "--help"):
        print(f"usage: dataset_token_count.py DATASET...\n\n{__doc__}")
        return 0
    for path in paths:
        print("Checking file", path)
        print("Dataset size in tokens is", make_dataset(path).total_tokens)
    return 0


if __name__ == "__main__":
    run_path(str(Path(__file__).resolve().parents[1] / "_start.py"))["start_main"](main)
