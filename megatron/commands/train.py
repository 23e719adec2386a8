"""Train a model: `python deepy.py train.py CONF.yml ...`, `srun python train.py ...` or alone."""

from __future__ import annotations

from megatron.early_signals import leave_until_started

if __name__ == "__main__":
    leave_until_started()  # before the imports that take seconds

import sys
from collections.abc import Sequence

from megatron.terminal import leaving_at_once, run_command


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code; docs/reliability.md lists them."""
    leave_until_started()
    from megatron.neox_arguments import parse_command_line

    args, _ = parse_command_line("train.py", argv)
    with leaving_at_once():
        from megatron.machine import settle_accelerator

        settle_accelerator()
        from megatron.training.entry import run_and_report

    return run_and_report(args)


if __name__ == "__main__":
    sys.exit(run_command(main))
