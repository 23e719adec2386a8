#!/usr/bin/env python
"""GPT-NeoX's export to Hugging Face, with its flags: tools/convert_checkpoint.py --to hf."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path

if __name__ == "__main__":
    beside = Path(__file__).resolve().parents[1] / "_start.py"
    run_path(str(beside))["start"]("convert_neox_to_hf")
