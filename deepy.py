#!/usr/bin/env python
"""Start train.py, evaluate.py or generate.py on one or many processes: see --help."""

from __future__ import annotations

import sys

from megatron.commands import run

if __name__ == "__main__":
    sys.exit(run("deepy", sys.argv[1:]))
