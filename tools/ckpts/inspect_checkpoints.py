#!/usr/bin/env python
"""GPT-NeoX's name for tools/inspect_checkpoint.py."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path

if __name__ == "__main__":
    beside = run_path(str(Path(__file__).resolve().parents[1] / "_start.py"))
    beside["start"]("inspect_checkpoint")
