"""Train a model: `python deepy.py train.py CONF.yml ...`, `srun python train.py ...` or alone."""

from __future__ import annotations

from megatron.terminal import leave, leave_until_started

if __name__ == "__main__":
    leave_until_started()  # before the imports that take seconds

import sys

from megatron.commands import run

if __name__ == "__main__":
    leave(run("train", sys.argv[1:]))
