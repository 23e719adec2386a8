#!/usr/bin/env python
"""Fetch a corpus, or take your own text, and turn it into token files for training."""

from __future__ import annotations

import sys

from megatron.commands import run

if __name__ == "__main__":
    sys.exit(run("prepare_data", sys.argv[1:]))
