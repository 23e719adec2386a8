#!/usr/bin/env python
"""Where GPT-NeoX has it: tools/preprocess_data.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _start import start

if __name__ == "__main__":
    start("preprocess_data")
