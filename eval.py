#!/usr/bin/env python
"""GPT-NeoX's name for evaluate.py: python deepy.py eval.py CONF... --eval_tasks TASK..."""

from __future__ import annotations

from megatron.commands import start

if __name__ == "__main__":
    start("eval")
