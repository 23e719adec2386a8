#!/usr/bin/env python
"""Fetch a corpus, or take your own text, and turn it into token files for training."""

from __future__ import annotations

from megatron.commands import start

if __name__ == "__main__":
    start("prepare_data")
