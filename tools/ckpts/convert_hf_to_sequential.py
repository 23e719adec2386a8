#!/usr/bin/env python
"""GPT-NeoX's import from Hugging Face, with its flags: tools/convert_checkpoint.py --to neox."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path

if __name__ == "__main__":
    beside = Path(__file__).resolve().parents[1] / "_start.py"
    run_path(str(beside))["start"]("convert_hf_to_sequential")
