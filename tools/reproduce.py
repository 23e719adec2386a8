#!/usr/bin/env python
"""Repeat the paper: tools/reproduce.py {plan,run,submit,status,report} --suite SUITE."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.paper.cli import main

if __name__ == "__main__":
    sys.exit(main())
