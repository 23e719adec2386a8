#!/usr/bin/env python
"""Start train.py, evaluate.py or generate.py on one or many processes: see --help."""

from __future__ import annotations

from megatron.commands import start

if __name__ == "__main__":
    start("deepy")
