#!/usr/bin/env python
"""Train a model: `python deepy.py train.py CONF.yml ...`, `srun python train.py ...` or alone."""

from __future__ import annotations

from megatron.terminal import exit_on_signal

if __name__ == "__main__":
    exit_on_signal()  # before the imports that take seconds

from megatron.commands import start

if __name__ == "__main__":
    start("train")
