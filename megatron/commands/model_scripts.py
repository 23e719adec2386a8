"""deepy.py, train.py, evaluate.py and generate.py.

deepy.py merges and validates configs, then prints a dry run or launches. The others run on every
process and import torch only after their arguments are checked.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.errors import ConfigError
from megatron.launcher.planning import find_script, plan_launch, run
from megatron.machine import set_deepspeed_accelerator
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.command_line import (
    add_config_arguments,
    load_config,
    parse_command_line,
)
from megatron.terminal import command_parser, exit_on_ctrl_c, exit_on_signal, shown_command

DEEPY = """Merge YAML configs, check them, and start SCRIPT on every process through DeepSpeed's
launcher. One process without a launcher: python SCRIPT CONF..."""
EXAMPLES = """examples:
  python deepy.py train.py configs/small_bf16.yml configs/local_setup.yml
  python deepy.py train.py -d configs small_bf16 local_setup --set train_iters=100
  python deepy.py train.py configs/small_bf16.yml configs/local_setup.yml \\
      --override configs/kerple/alibi.yml
  python deepy.py train.py configs/XL.yml configs/local_setup.yml --dry-run
  python deepy.py evaluate.py configs/small_bf16.yml configs/local_setup.yml \\
      --eval_tasks extrapolation passkey
"""


def deepy(argv: Sequence[str] | None = None) -> int:
    """Returns the job's exit code; 2 for a wrong config."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = command_parser("deepy.py", DEEPY, EXAMPLES, allow_abbrev=False)
    parser.add_argument("script", help="train.py, evaluate.py, generate.py or a script of yours")
    add_config_arguments(parser)
    options = parser.parse_intermixed_args(arguments)
    script = find_script(options.script, Path(__file__).resolve().parents[2])
    args = load_config(options)
    if options.dry_run:
        print(_explain(script, args))
        return 0
    plan = plan_launch(script, args)
    if args.optimization.train_iters or args.optimization.train_epochs:
        args.batch_plan(plan.world_size)
    # The command that an interrupted rank prints: its own arguments are encoded.
    os.environ["KERPLE_COMMAND"] = f"{shown_command('deepy')} {shlex.join(arguments)}"
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return run(plan)


def _explain(script: list[str], args: NeoXArgs) -> str:
    """The dry run, also on a machine that cannot run the job."""
    from megatron.commands.dry_run import dry_run_report

    smallest = args.parallel.processes_per_replica
    try:
        plan = plan_launch(script, args)
        args.batch_plan(plan.world_size)
    except ConfigError as error:
        report = dry_run_report(args, smallest)
        assumed = f"{smallest} process{'es' if smallest > 1 else ''}, the fewest that can hold it"
        return f"{report}\n\n# launch\nnot from here: {error}\n(above: {assumed})"
    warnings = [f"warning: {warning}" for warning in plan.warnings]
    return "\n".join([dry_run_report(plan.args, plan.world_size, plan.command()), *warnings])


def _parsed(script: str, argv: Sequence[str] | None) -> tuple[NeoXArgs, argparse.Namespace]:
    """Config and options; with `--dry-run` they are printed and the process ends."""
    args, options = parse_command_line(script, argv)
    if options.dry_run:
        from megatron.commands.dry_run import dry_run_report

        print(dry_run_report(args))
        raise SystemExit(0)
    return args, options


def train(argv: Sequence[str] | None = None) -> int:
    """train.py's exit code; docs/reliability.md lists them."""
    exit_on_signal()
    args, _ = _parsed("train.py", argv)
    set_deepspeed_accelerator()
    from megatron.training.entry import run_and_report

    return run_and_report(args)


def evaluate(argv: Sequence[str] | None = None) -> int:
    """evaluate.py's exit code: 0 when every task gave a result."""
    args, options = _parsed("evaluate.py", argv)
    with exit_on_ctrl_c():
        set_deepspeed_accelerator()
        from megatron.evaluation.evaluator import run_evaluation

    return run_evaluation(args, options.local_rank)


def generate(argv: Sequence[str] | None = None) -> int:
    """generate.py's exit code."""
    args, options = _parsed("generate.py", argv)
    with exit_on_ctrl_c():
        set_deepspeed_accelerator()
        from megatron.generation.text import run_generation

    return run_generation(args, options.local_rank)
