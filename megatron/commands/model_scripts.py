"""deepy.py, train.py, evaluate.py and generate.py; `kerple check`, `serve`, `init`.

deepy.py merges and validates configs, then prints a dry run or launches. The others run on every
process and import torch only after their arguments are checked. `init` writes the demo's config.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.atomic_files import check_writable, write_text
from megatron.errors import ConfigError
from megatron.launcher.planning import find_script, plan_launch, run
from megatron.machine import set_deepspeed_accelerator
from megatron.neox_arguments import GROUPS, OWNER, NeoXArgs
from megatron.neox_arguments.catalogue import METHODS
from megatron.neox_arguments.command_line import (
    add_checkpoint_arguments,
    add_config_arguments,
    add_set_argument,
    load_config,
    parse_command_line,
)
from megatron.neox_arguments.yaml_files import dump_yaml
from megatron.terminal import (
    command_parser,
    exit_on_ctrl_c,
    exit_on_signal,
    print_next_command,
    shown_command,
)

DEEPY = """Merge YAML configs, check them, and start SCRIPT on every process through DeepSpeed's
launcher. One process without a launcher: python SCRIPT CONF..."""
EVAL_TASKS = ("--eval_tasks", "--eval-tasks")
EXAMPLES = """examples:
  python deepy.py train.py configs/small_bf16.yml configs/local_setup.yml
  python deepy.py train.py -d configs small_bf16 local_setup --set train_iters=100
  python deepy.py train.py configs/small_bf16.yml configs/local_setup.yml \\
      --override configs/kerple/alibi.yml
  python deepy.py train.py configs/XL.yml configs/local_setup.yml --dry-run
  python deepy.py evaluate.py configs/small_bf16.yml configs/local_setup.yml \\
      --eval_tasks extrapolation passkey
  python deepy.py generate.py runs/first --set maximum_tokens=200
"""


def deepy(argv: Sequence[str] | None = None) -> int:
    """Returns the job's exit code; 2 for a wrong config."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = command_parser("deepy.py", DEEPY, EXAMPLES, allow_abbrev=False)
    parser.add_argument("script", help="train.py, evaluate.py, generate.py or a script of yours")
    add_config_arguments(parser)
    options = parser.parse_intermixed_args(arguments)
    script = find_script(options.script, Path(__file__).resolve().parents[2])
    args = load_config(options, options.script, _exported_config)
    if options.dry_run:
        from megatron.commands.dry_run import explain

        print(explain(script, args))
        return 0
    plan = plan_launch(script, args)
    if args.optimization.train_iters or args.optimization.train_epochs:
        args.batch_plan(plan.world_size)
    # The command that an interrupted rank prints: its own arguments are encoded.
    os.environ["KERPLE_COMMAND"] = f"{shown_command('deepy')} {shlex.join(arguments)}"
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return run(plan)


CHECK = """One page on whether your GPT-NeoX config runs here: which of its keys are kept, written
otherwise, without effect or refused; parameters, memory, batch, files and the launch.

kerple check my.yml
kerple check configs/125M.yml configs/local_setup.yml --set pos_emb=kerple_log

It ends with 0 if training would start with these keys, and with 2 if a key is refused; then the
numbers are those of the config without the refused keys.
"""


def check(argv: Sequence[str] | None = None) -> int:
    """kerple check's exit code: 0 if the config is accepted, 2 if a key is refused."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = command_parser("kerple check", CHECK, allow_abbrev=False)
    add_config_arguments(parser, ("evaluation", "generation", "logging"))
    options = parser.parse_intermixed_args(words)
    from megatron.commands.dry_run import check_page

    return check_page(options, words)


def _exported_config(folder: Path) -> NeoXArgs:
    """Of a Hugging Face folder, ours or another's."""
    from megatron.checkpoints.hf.folder import read_config

    return read_config(folder)[1]


def _parsed(script: str, argv: Sequence[str] | None) -> tuple[NeoXArgs, argparse.Namespace]:
    """Config and options; with `--dry-run` they are printed and the process ends."""
    args, options = parse_command_line(script, argv, _exported_config)
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
    words = list(sys.argv[1:] if argv is None else argv)
    asked = [words[i + 1 : i + 2] for i, word in enumerate(words) if word in EVAL_TASKS]
    if ["list"] in asked:  # needs no config
        from megatron.evaluation.task_registry import task_listing

        print(task_listing())
        return 0
    args, options = _parsed("evaluate.py", words)
    with exit_on_ctrl_c():
        set_deepspeed_accelerator()
        from megatron.evaluation.evaluator import run_evaluation

    return run_evaluation(args, options.local_rank)


def generate(argv: Sequence[str] | None = None) -> int:
    """generate.py's exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "--onnx" in words:
        return _generate_onnx(words)
    args, options = _parsed("generate.py", words)
    with exit_on_ctrl_c():
        set_deepspeed_accelerator()
        from megatron.generation.text import run_generation

    return run_generation(args, options.local_rank)


ONNX = """Write text with a model that convert_checkpoint --to onnx wrote, in ONNX Runtime.

generate.py --onnx FOLDER/model.onnx --set maximum_tokens=200
generate.py --onnx FOLDER/model.onnx -i prompts.txt -o samples.txt
"""


def _generate_onnx(words: Sequence[str]) -> int:
    parser = command_parser("generate.py --onnx", ONNX)
    parser.add_argument(
        "--onnx", type=Path, metavar="FILE", help="model.onnx, its tokenizer beside"
    )
    parser.add_argument("-i", dest="sample_input_file", metavar="FILE", help="prompts, one a line")
    parser.add_argument("-o", dest="sample_output_file", metavar="FILE", help="(samples.txt)")
    parser.add_argument("--text_gen_type", help=argparse.SUPPRESS)  # kerple chat
    add_set_argument(parser, "keys of generation, e.g. temperature=0")
    given = vars(parser.parse_args(words))
    sets, file = given.pop("sets"), given.pop("onnx")
    chosen = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    for item in sets:
        if OWNER.get(item.partition("=")[0]) != "generation":
            raise ConfigError(f"--set {item:.80}: with --onnx, keys of generation only")
    from megatron.generation.text import run_onnx

    small = ["num_layers=1", "hidden_size=1", "num_attention_heads=1", "seq_length=1"]
    args = NeoXArgs.from_files([], sets=[*small, "max_position_embeddings=1", *sets, *chosen])
    return run_onnx(file, args.generation, args.runtime.seed)


# kerple serve: OpenAI's completions over HTTP.

SERVE = """Answer OpenAI's completions over HTTP with a run's model, on one machine.

kerple serve runs/first                                then, with the package openai:
  client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
  client.completions.create(model="first", prompt="def main(", max_tokens=40, stream=True)

Routes: /v1/completions (stream: true for server-sent events), /v1/models, /health.
For production use vLLM (convert_checkpoint --to hf; docs/generation.md, vLLM) or ONNX Runtime
(--to onnx): this server runs one batch at a time and asks for no key.
"""
SERVE_LIMITS: dict[str, tuple[float, str]] = {
    "queue": (256, "prompts that may wait; a further request gets 429"),
    "batch": (8, "prompts that run in one batch"),
    "max_tokens": (1024, "most new tokens of a prompt"),
    "max_context": (8192, "most tokens of a prompt and its completion"),
    "seconds": (120.0, "time for a request; its text is cut off after it"),
}


def serve(argv: Sequence[str] | None = None) -> int:
    """kerple serve's exit code: 0 after SIGTERM."""
    parser = command_parser("kerple serve", SERVE)
    parser.add_argument("run", metavar="RUN", help="a run's, a checkpoint's or an exported folder")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port (8000; 0: a free one)")
    parser.add_argument("--name", help="the model's name in requests (the folder's)")
    dtypes = ("fp32", "bf16", "fp16", "int8")
    parser.add_argument("--dtype", choices=dtypes, default="fp32", help="precision (fp32)")
    for name, (value, meaning) in SERVE_LIMITS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(value), default=value, help=f"{meaning} ({value:g})")
    add_checkpoint_arguments(parser)
    options = parser.parse_args(argv)
    from megatron.generation import server

    return server.serve(options)


# kerple init: a first config in the working directory, every key with its meaning.

INIT = """Write a first config, to edit: the demo's model, which trains on two CPU cores in minutes.

kerple init                      my_model.yml, with pos_emb: kerple_log
kerple init mine --set pos_emb=alibi train_iters=1000
"""


def init(argv: Sequence[str] | None = None) -> int:
    from megatron.paper.suite import load_suite

    parser = command_parser("kerple init", INIT)
    parser.add_argument(
        "name", nargs="?", default="my_model", help="NAME.yml; runs/NAME (my_model)"
    )
    add_set_argument(parser, "other values, e.g. pos_emb=alibi")
    options = parser.parse_args(argv)
    path = Path(options.name.removesuffix(".yml") + ".yml")
    if path.exists():
        raise ConfigError(f"{path}: exists; give another NAME, or delete it.")
    check_writable(path, "NAME")
    run = f"runs/{path.stem}"
    config = dict(load_suite("demo").runs[0].config)
    config |= {"save": run, "load": run}
    for key in ("num_gpus", "zero_optimization"):
        config.pop(key, None)
    given = [f"{key}={json.dumps(value)}" for key, value in config.items()]
    named = {item.partition("=")[0].replace("-", "_"): item for item in options.sets}
    if "save" in named and "load" not in named:
        given.append(f"load={named['save'].partition('=')[2]}")
    args = NeoXArgs.from_files([], sets=[*given, *options.sets]).to_dict()
    keys = {*config, *(name.partition(".")[0] for name in named)}
    values = {key: value for key, value in args.items() if key in keys}
    write_text(path, explained(values))
    print(f"{path}: {len(values)} keys; every other key: docs/neox_arguments.md")
    if not Path(f"{config['data_path']}.idx").is_file():
        print_next_command(f"{shown_command('prepare_data')} stdlib")
    print_next_command(f"{shown_command('train')} {path}")
    return 0


def explained(values: dict[str, object]) -> str:
    """YAML with the meaning of each key above it, group by group."""
    lines = [f"# pos_emb: {', '.join(METHODS)}, or module:Class of yours."]
    for group, fields in GROUPS.items():
        own = {key: value for key, value in values.items() if OWNER.get(key) == group}
        if own:
            lines += ["", f"# --- {group} ---"]
        for key, value in own.items():
            meaning = (fields.model_fields[key].description or "").split("\n")[0]
            lines += [f"# {meaning}", dump_yaml({key: value}).rstrip("\n")]
    return "\n".join(lines) + "\n"
