#!/usr/bin/env python
"""Evaluate a checkpoint: python deepy.py evaluate.py CONF... --eval_tasks TASK..."""

from __future__ import annotations

from megatron.commands import start

if __name__ == "__main__":
    start("evaluate")
