"""Evaluate a checkpoint: python deepy.py evaluate.py CONF... --eval_tasks TASK..."""

from __future__ import annotations

import sys

from megatron.neox_arguments import parse_command_line


def main() -> int:
    """The exit code: 0 when every task gave a result."""
    args, options = parse_command_line("evaluate.py")
    from megatron.evaluation.evaluator import run_evaluation

    return run_evaluation(args, options.local_rank)


if __name__ == "__main__":
    sys.exit(main())
