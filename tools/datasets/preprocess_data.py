#!/usr/bin/env python
"""Where GPT-NeoX has it: tools/preprocess_data.py."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path

if __name__ == "__main__":
    beside = Path(__file__).resolve().parents[1] / "_start.py"
    run_path(str(beside))["start"]("preprocess_data")
