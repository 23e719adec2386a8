#!/usr/bin/env python
"""Where GPT-NeoX has it: tools/merge_datasets.py."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path

if __name__ == "__main__":
    beside = run_path(str(Path(__file__).resolve().parents[1] / "_start.py"))
    beside["start"]("merge_datasets")
