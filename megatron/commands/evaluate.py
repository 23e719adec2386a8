"""Evaluate a checkpoint: python deepy.py evaluate.py CONF... --eval_tasks TASK..."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron.terminal import leaving_at_once, run_command


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 when every task gave a result."""
    from megatron.neox_arguments import parse_command_line

    args, options = parse_command_line("evaluate.py", argv)
    with leaving_at_once():
        from megatron.machine import settle_accelerator

        settle_accelerator()
        from megatron.evaluation.evaluator import run_evaluation

    return run_evaluation(args, options.local_rank)


if __name__ == "__main__":
    sys.exit(run_command(main))
