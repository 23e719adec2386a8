#!/usr/bin/env python
"""GPT-NeoX's tool of this name: answers with the command to use."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path

if __name__ == "__main__":
    run_path(str(Path(__file__).resolve().parents[1] / "_start.py"))["answer"]()
