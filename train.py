"""Train a model: `python deepy.py train.py CONF.yml ...`, `srun python train.py ...` or alone."""

from __future__ import annotations

from megatron.terminal import leave_until_started

if __name__ == "__main__":
    leave_until_started()  # before the imports that take seconds

from megatron.commands import start

if __name__ == "__main__":
    start("train")
