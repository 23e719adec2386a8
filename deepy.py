#!/usr/bin/env python
"""Start train.py, evaluate.py or generate.py on one or many processes: see --help."""

from __future__ import annotations

import sys

from megatron.launcher.deepy_command import main

if __name__ == "__main__":
    sys.exit(main())
