"""The command line that deepy.py, train.py, evaluate.py and generate.py share."""

from __future__ import annotations

import argparse
import base64
import binascii
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError, KerpleError
from megatron.neox_arguments.allowed_code import TAG, allow_kernel, classes_in
from megatron.neox_arguments.arguments import NeoXArgs
from megatron.neox_arguments.declared_keys import GROUPS, OWNER
from megatron.terminal import Parser, print_error

HOSTFILE_VARIABLE = "DLTS_HOSTFILE"
"""Names a hostfile for all configs, as in GPT-NeoX and on some clusters."""

# deepy.py hands the config over as one argument; Linux takes up to 128 KiB in one.
MAX_PAYLOAD = 120_000

CONFIG_FLAGS: dict[str, tuple[str, dict[str, Any]]] = {
    "wandb_group": ("--wandb_group", {}),
    "wandb_run_name": ("--wandb_run_name", {}),
    "wandb_team": ("--wandb_team", {}),
    "eval_tasks": ("--eval_tasks", {"nargs": "+"}),
    "iteration": ("--iteration", {"type": int}),
    "eval_results_prefix": ("--eval_results_prefix", {}),
    "eval_lengths": ("--eval_lengths", {"type": int, "nargs": "+"}),
    "eval_window": ("--eval_window", {"type": int}),
    "eval_context_length": ("--eval_context_length", {"type": int}),
    "eval_stride": ("--eval_stride", {"type": int}),
    "eval_limit": ("--limit --eval_limit", {"type": float}),
    "eval_include_path": ("--include_path", {}),
    "num_fewshot": ("--num_fewshot", {"type": int}),
    "hostfile": ("-H --hostfile", {}),
    "text_gen_type": ("--text_gen_type", {}),
    "sample_input_file": ("-i --sample_input_file", {}),
    "sample_output_file": ("-o --sample_output_file", {}),
}
"""Config key -> flags that set it on top of every file, and argparse's options for them."""


_SEVERAL: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}


def add_config_arguments(parser: argparse.ArgumentParser, hidden: Sequence[str] = ()) -> None:
    """CONF files, --override, --set and the shortcuts for single keys.

    Shortcuts of the `hidden` groups of keys work, and are left out of --help.
    """
    parser.add_argument(
        "conf_files",
        nargs="*",
        metavar="CONF",
        help="YAML files; `.yml` may be left out. To evaluate and to generate, the folder of a "
        "run, of a checkpoint or of an export is enough: its saved config is used",
    )
    parser.add_argument("-d", "--conf_dir", metavar="DIR", help="directory of the CONF files")
    winning = "YAML files that win over the files before"
    parser.add_argument("--override", metavar="CONF", help=winning, **_SEVERAL)
    add_set_argument(parser, "single values that win over all files, e.g. optimizer.params.lr=1e-4")
    add_allow_kernel_argument(parser)
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="explain and exit")
    for key, (flags, options) in CONFIG_FLAGS.items():
        spelled = [each for flag in flags.split() for each in (flag, flag.replace("_", "-"))]
        described = GROUPS[OWNER[key]].model_fields[key].description
        meaning = argparse.SUPPRESS if OWNER[key] in hidden else described
        parser.add_argument(*dict.fromkeys(spelled), dest=key, help=meaning, **options)


def add_set_argument(parser: argparse.ArgumentParser, meaning: str) -> None:
    """`--set KEY=VALUE ...`, as `sets`."""
    parser.add_argument("--set", dest="sets", metavar="KEY=VALUE", help=meaning, **_SEVERAL)


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Which checkpoint of a run to open, and whose classes it may name."""
    parser.add_argument("--iteration", type=int, help="which global_stepN of a run (latest)")
    add_allow_kernel_argument(parser)


def add_allow_kernel_argument(parser: argparse.ArgumentParser) -> None:
    """For every command that opens checkpoints; what is named is allowed as it is parsed."""

    def allowed(name: str) -> str:
        try:
            allow_kernel(name)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return name

    parser.add_argument(
        "--allow-kernel",
        "--allow_kernel",
        action="append",
        default=[],
        type=allowed,
        metavar="MODULE:CLASS",
        help="import this class of yours if a checkpoint's pos_emb names it",
    )


def add_suffix(name: str, directory: str | None = None) -> Path:
    """`small` with directory `configs` -> configs/small.yml."""
    path = Path(directory) / name if directory else Path(name)
    return path if path.suffix in (".yml", ".yaml", ".json") else Path(f"{path}.yml")


def saved_configs(folder: Path, iteration: int | None) -> tuple[list[Path], list[str]]:
    """The saved config of a run's or a checkpoint's folder, and the values that select its weights.

    Ours has configs/resolved.yml, GPT-NeoX's the files of its command line.
    """
    root, tag = folder, f"global_step{iteration}" if iteration is not None else None
    tags = (TAG.fullmatch(entry.name) for entry in folder.iterdir())
    steps = sorted(int(match[1]) for match in tags if match)
    if TAG.fullmatch(folder.absolute().name):
        root, tag = folder.absolute().parent, folder.absolute().name
    elif iteration is not None and steps and iteration not in steps:
        there = ", ".join(map(str, steps))
        raise ConfigError(f"--iteration {iteration}: {folder} has no such step; there are {there}.")
    elif tag is None and (folder / "latest").is_file():
        tag = (folder / "latest").read_text("utf-8", "replace")[:80].strip()
    elif tag is None:
        tag = f"global_step{steps[-1]}" if steps else None
    match = TAG.fullmatch(tag or "")
    step = match[1] if match else None
    for place in ([root / f"global_step{step}"] if step else []) + [root]:
        configs = place / "configs"
        resolved = configs / "resolved.yml"
        if files := [resolved] if resolved.is_file() else sorted(configs.glob("*.y*ml")):
            return files, [f"load={json.dumps(str(root))}", f"iteration={step or 'null'}"]
    raise ConfigError(
        f"{folder}: a folder without a saved config (configs/*.yml in it or in its global_stepN); "
        "give the YAML files, and the folder with --set load=..."
    )


def config_files(options: argparse.Namespace) -> list[Path]:
    """The YAML files that a parsed command line names, those after --override last."""
    return [add_suffix(name, options.conf_dir) for name in [*options.conf_files, *options.override]]


def load_config(
    options: argparse.Namespace,
    script: str = "",
    exported: Callable[[Path], NeoXArgs] | None = None,
) -> NeoXArgs:
    """The config that a parsed command line describes; `script` is what will run with it.

    `exported` reads the config of a Hugging Face folder.
    """
    if not options.conf_files and not options.override:
        raise ConfigError("no config file and no run's folder given, e.g. configs/small_bf16.yml.")
    files: list[Path] = []
    sets = list(options.sets)
    if HOSTFILE_VARIABLE in os.environ:
        sets.insert(0, f"hostfile={json.dumps(os.environ[HOSTFILE_VARIABLE])}")
    for name in options.conf_files:
        file = add_suffix(name, options.conf_dir)
        folder = Path(options.conf_dir or "", name)
        if file.exists() or not folder.is_dir():
            files.append(file)
            continue
        trains = Path(script).stem == "train"
        if exported is not None and (folder / "config.json").is_file() and not trains:
            model = exported(folder).model.model_dump(mode="json")
            sets = [f"{key}={json.dumps(value)}" for key, value in model.items()] + sets
            sets.insert(0, f"load={json.dumps(str(folder))}")
            continue
        found, chosen = saved_configs(folder, options.iteration)
        if trains:
            raise ConfigError(
                f"{folder}: a folder is enough for evaluate.py and generate.py; train.py takes "
                f"YAML files, for instance {found[0]}."
            )
        files += found
        sets = [*chosen, *sets]
    for key in CONFIG_FLAGS:
        value = getattr(options, key)
        if value is not None:
            sets.append(f"{key}={json.dumps(value)}")
    return NeoXArgs.from_files(
        files,
        overrides=[add_suffix(name, options.conf_dir) for name in options.override],
        sets=sets,
    )


def encode_config(args: NeoXArgs) -> str:
    """The config as one word that a shell does not change."""
    for sources in (args.sources, {}):
        content = json.dumps({"config": args.to_dict(), "sources": sources})
        payload = base64.urlsafe_b64encode(content.encode("utf-8")).decode("ascii")
        if len(payload) <= MAX_PAYLOAD:
            return payload
    raise ConfigError(
        f"the merged config is {len(payload)} characters long, more than one argument may be. "
        "Shorten lists such as train_data_paths."
    )


def decode_config(payload: str) -> NeoXArgs:
    """The inverse of `encode_config`; validates again."""
    try:
        value = json.loads(base64.b64decode(payload, altchars=b"-_", validate=True))
        config, sources = value["config"], value["sources"]
        texts = {str(name): str(text) for name, text in sources.items()}
    except (binascii.Error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ConfigError(
            "--megatron_config is not a config made by deepy.py; pass YAML files instead."
        ) from e
    if isinstance(config, dict):
        allow_kernel(classes_in(config))  # deepy.py has checked where the name came from
    return NeoXArgs.from_dict(config).with_sources(texts)


_SCRIPTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "train.py": ("Train a model", ("evaluation", "generation")),
    "evaluate.py": ("Measure a run's or a checkpoint's model", ("generation", "logging")),
    "generate.py": ("Write text with a run's or a checkpoint's model", ("evaluation", "logging")),
}
"""Script -> what it does, and the groups of keys that its --help leaves out."""


def build_script_parser(script_name: str) -> argparse.ArgumentParser:
    """Parser of train.py, evaluate.py and generate.py."""
    does, hidden = _SCRIPTS.get(script_name, (script_name, ()))
    parser = Parser(
        prog=script_name,
        allow_abbrev=False,
        description=f"{does} in this process (or in each of srun's or torchrun's). "
        f"`python deepy.py {script_name} ...` starts several.",
    )
    add_config_arguments(parser, hidden)
    parser.add_argument("--megatron_config", help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


def parse_command_line(
    script_name: str,
    argv: Sequence[str] | None = None,
    exported: Callable[[Path], NeoXArgs] | None = None,
) -> tuple[NeoXArgs, argparse.Namespace]:
    """Config and options of a script: YAML files, or what deepy.py passes on.

    A wrong config ends the process with `error: ...` and status 2.
    """
    parser = build_script_parser(script_name)
    options = parser.parse_intermixed_args(list(sys.argv[1:] if argv is None else argv))
    try:
        if options.megatron_config is not None:
            args = decode_config(options.megatron_config)
        else:
            args = load_config(options, script_name, exported)
    except KerpleError as error:
        raise SystemExit(print_error(error)) from None
    return args, options
