"""Train a model: `python deepy.py train.py CONF.yml ...`, `srun python train.py ...` or alone."""

from __future__ import annotations

import sys

from megatron.neox_arguments import parse_command_line


def main() -> int:
    args, _ = parse_command_line("train.py")
    from megatron.training.entry import run_and_report

    return run_and_report(args)


if __name__ == "__main__":
    sys.exit(main())
