"""`kerple init`: a first config in the working directory, every key with its meaning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megatron.atomic_files import check_writable, write_text
from megatron.errors import ConfigError
from megatron.neox_arguments import GROUPS, OWNER, NeoXArgs
from megatron.neox_arguments.catalogue import METHODS
from megatron.neox_arguments.yaml_files import dump_yaml
from megatron.terminal import command_parser, print_next_command, shown_command

TEXT = """Write a first config, to edit: the demo's model, which trains on two CPU cores in minutes.

kerple init                      first.yml, with pos_emb: kerple_log
kerple init mine --set pos_emb=alibi train_iters=1000
"""


def init(argv: Sequence[str] | None = None) -> int:
    from megatron.neox_arguments.command_line import add_set_argument
    from megatron.paper.suite import load_suite

    parser = command_parser("kerple init", TEXT)
    parser.add_argument("name", nargs="?", default="first", help="NAME.yml; runs/NAME (first)")
    add_set_argument(parser, "other values, e.g. pos_emb=alibi")
    options = parser.parse_args(argv)
    path = Path(options.name).with_suffix(".yml")
    if path.exists():
        raise ConfigError(f"{path}: is there already; give another NAME, or delete it.")
    check_writable(path, "NAME")
    run = f"runs/{path.stem}"
    config = dict(load_suite("demo").runs[0].config)
    config |= {"save": run, "load": run}
    for key in ("num_gpus", "zero_optimization"):
        config.pop(key, None)
    given = [f"{key}={json.dumps(value)}" for key, value in config.items()]
    args = NeoXArgs.from_files([], sets=[*given, *options.sets]).to_dict()
    keys = {*config, *(item.partition("=")[0].partition(".")[0] for item in options.sets)}
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
