#!/usr/bin/env python
"""GPT-NeoX's export to Hugging Face, with its flags: tools/convert_checkpoint.py --to hf."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _start import start

if __name__ == "__main__":
    start("convert_neox_to_hf")
