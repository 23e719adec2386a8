"""`--dry-run`: the resolved config with its parameters, memory, batch, launch; `kerple check`.

`kerple check` prints the same for files of GPT-NeoX's, with what becomes of each of their keys in
place of the config.
"""

from __future__ import annotations

import argparse
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError
from megatron.launcher.planning import find_script, plan_launch
from megatron.machine import count_gpus, memory_bytes
from megatron.model.layer_formulas import pattern_places
from megatron.model.outline import ModelOutline, layer_ranges
from megatron.model.sizes import ModelSizes
from megatron.neox_arguments import FACTS, GROUPS, OWNER, NeoXArgs
from megatron.neox_arguments.catalogue import label_of
from megatron.neox_arguments.command_line import config_files, load_config
from megatron.neox_arguments.gpt_neox_differences import DIFFERENCES
from megatron.neox_arguments.normalize import canonical_key, normalize, underscore_keys
from megatron.neox_arguments.optimization_keys import plan_batch
from megatron.neox_arguments.run_keys import DataArgs, TokenizerArgs
from megatron.neox_arguments.yaml_files import dump_yaml, parse_yaml, read_text
from megatron.terminal import EXIT_USER_ERROR, shown_command

NAMED_VOCABULARIES = ("HFGPT2Tokenizer", "TiktokenTokenizer")
"""Tokenizers whose vocab_file may be a name that their library knows, and no file."""


def dry_run_report(
    args: NeoXArgs, world_size: int = 1, command: Sequence[str] = (), *, keys: str = ""
) -> str:
    """The whole report as text; `keys` stands in place of the config."""
    sizes = ModelSizes(args)
    sections = [
        keys or _config_section(args),
        *([_layer_section(sizes.outline)] if args.model.layer_pattern else []),
        _parameter_section(sizes),
        _memory_section(sizes, world_size),
        _batch_section(sizes, world_size),
        _files_section(args.tokenizer, args.data),
    ]
    if command:
        sections.append("# launch command\n" + " ".join(command))
    return "\n\n".join(sections)


def explain(script: list[str], args: NeoXArgs, keys: str = "") -> str:
    """The report with the launch, also on a machine that cannot run the job."""
    smallest = args.parallel.processes_per_replica
    try:
        plan = plan_launch(script, args)
        args.batch_plan(plan.world_size)
    except ConfigError as error:
        report = dry_run_report(args, smallest, keys=keys)
        assumed = f"{smallest} process{'es' if smallest > 1 else ''}, the fewest that can hold it"
        return f"{report}\n\n# launch\nnot possible here: {error}\n(above: {assumed})"
    warnings = [f"warning: {warning}" for warning in plan.warnings]
    report = dry_run_report(plan.args, plan.world_size, plan.command(), keys=keys)
    return "\n".join([report, *warnings])


def _config_section(args: NeoXArgs) -> str:
    parts = ["# resolved config"]
    for name in GROUPS:
        values = getattr(args, name).model_dump(exclude_none=True)
        parts.append(f"# {name}\n" + dump_yaml(values).rstrip())
    return "\n".join([*parts, f"# config hash {args.config_hash()}"])


def _layer_section(outline: ModelOutline) -> str:
    """Which layers have which keys of layer_pattern, and which kernels they share."""
    pattern, number = outline.spec.layer_pattern or [], outline.spec.num_layers
    places = pattern_places(pattern, number)
    rows = []
    for place, entry in enumerate(pattern):
        layers = layer_ranges(layer for layer in range(number) if places[layer] == place)
        keys = ", ".join(f"{key}: {value}" for key, value in entry.items() if key != "count")
        rows.append(f"{layers or 'no layer':24s} {keys or 'as the model'}")
    kernels = [
        f"{'kernel of ' + layer_ranges(layers):24s} {label_of(spec.pos_emb)}"
        for _, spec, layers in outline.kernels()
    ]
    return "\n".join(["# layers, from 1", *rows, *kernels])


def _parameter_section(sizes: ModelSizes) -> str:
    count, model = sizes.parameters, sizes.spec
    rows = [
        ("embedding", count.embedding),
        (f"positions ({label_of(model.method)})", count.positions),
        (f"{model.num_layers} layers", count.layers),
        ("final norm", count.final_norm),
        ("head" if count.head else "head (tied to the embedding)", count.head),
        ("total", count.total),
    ]
    width = max(34, *(len(name) for name, _ in rows))
    lines = [f"{name:{width}s} {number:>18,}" for name, number in rows]
    notes = [f"note: {text}" for text in sizes.assumptions]
    title = f"# parameters (vocabulary padded to {model.padded_vocab_size:,})"
    return "\n".join([title, *lines, *notes])


def _memory_section(sizes: ModelSizes, world_size: int) -> str:
    stage = sizes.optimization.zero_stage_in_effect
    title = f"# memory per process (ZeRO stage {stage}, estimated)"
    try:
        memory = sizes.memory(world_size)
    except ConfigError as error:
        return f"{title}\nnot possible: {error}"
    names = ("parameters", "gradients", "optimizer", "activations (rule of thumb)", "total")
    rows = zip(names, (*memory, memory.total), strict=True)
    lines = [f"{name:34s} {number / 2**30:>14.2f} GiB" for name, number in rows]
    tokens = sizes.spec.seq_length
    cached = f"{sizes.cache_bytes(tokens) / 2**20:>14.2f} MiB"
    lines.append(f"{f'KV cache of {tokens:,} tokens, generating':34s} {cached}")
    return "\n".join([title, *lines, *_here(sizes, world_size)])


def _here(sizes: ModelSizes, world_size: int) -> list[str]:
    """How that compares with this machine, unless it has GPUs, whose memory is not asked here."""
    available = memory_bytes()
    if available is None or count_gpus():
        return []
    line = f"{'this machine, without a GPU':34s} {available / 2**30:>14.2f} GiB"
    shortage = sizes.shortage(world_size, available, "this machine")
    return [line, f"warning: {shortage}"] if shortage else [line]


def _files_section(tokenizer: TokenizerArgs, data: DataArgs) -> str:
    """Which of the files that training would open are there."""
    title = "# files"
    wanted = [("vocab_file", tokenizer.vocab_file), ("merge_file", tokenizer.merge_file)]
    named = {"data_path": [data.data_path] if data.data_path else []}
    for split in ("train", "valid", "test"):
        named[f"{split}_data_paths"] = getattr(data, f"{split}_data_paths") or []
        named[f"{split}_label_data_paths"] = data.label_paths(split)
    rows = [(key, path, Path(path).expanduser().exists()) for key, path in wanted if path]
    if tokenizer.tokenizer_type in NAMED_VOCABULARIES:
        rows = [row for row in rows if row[2]]
    rows += [
        (key, f"{path}{suffix}", Path(f"{path}{suffix}").is_file())
        for key, paths in named.items()
        for path in paths
        for suffix in (".bin", ".idx")
    ]
    lines = [f"{'found  ' if there else 'MISSING'} {key}: {path}" for key, path, there in rows]
    if not any(named.values()):
        lines.append("MISSING data: neither data_path nor train_data_paths is set")
    return "\n".join([title, *lines])


def _batch_section(sizes: ModelSizes, world_size: int) -> str:
    length, optimization, parallel = sizes.spec.seq_length, sizes.optimization, sizes.parallel
    title = f"# batch on {world_size} process{'es' if world_size > 1 else ''}"
    try:
        plan = plan_batch(optimization, parallel, world_size)
    except ConfigError as error:
        return f"{title}\nnot possible: {error}"
    tokens = plan.train_batch_size * length
    lines = [
        f"{plan.micro_batch_size} sequences x {plan.gradient_accumulation_steps} accumulation "
        f"x {plan.data_parallel_size} data-parallel = {plan.train_batch_size} sequences per step",
        f"{plan.train_batch_size} x {length} = {tokens:,} tokens per step",
    ]
    if (shared := parallel.sequence_parallel_size) > 1:
        heads = sizes.spec.num_attention_heads // parallel.model_parallel_size // shared
        lines.append(
            f"{shared} processes share each sequence: {length // shared} positions each and, in "
            f"attention, {heads} heads"
        )
    flops = sizes.outline.training_flops_per_token(length)
    lines.append(f"{flops:.3g} flops per token, forward and backward")
    steps = optimization.train_iters
    if steps:
        lines.append(f"{steps:,} steps = {steps * tokens:,} tokens in all")
    elif epochs := optimization.train_epochs:
        lines.append(f"train_epochs = {epochs}: the number of steps follows from the data")
    elif steps == 0:
        lines.append("train_iters = 0: evaluation only")
    return "\n".join([title, *lines])


# kerple check: what becomes of each key of a file of GPT-NeoX's.


@dataclass
class CheckedKeys:
    """The keys of all files, by what becomes of them."""

    kept: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    """Lines: as written, and as read here."""
    idle: list[str] = field(default_factory=list)
    """A feature that is switched off, or a key that has no effect here."""
    refused: list[str] = field(default_factory=list)
    """The lines with which train.py would end."""
    values: dict[str, Any] = field(default_factory=dict)
    """What is not refused, under its name here."""
    written: dict[str, Any] = field(default_factory=dict)
    """What is not refused, as the files have it."""

    def section(self) -> str:
        lines = [f"kept            {len(self.kept):>3}", *_wrapped(", ".join(self.kept))]
        for title, found in (("written otherwise", self.changed), ("refused", self.refused)):
            lines += [f"{title:<17}{len(found):>2}", *(f"  {line}" for line in found)]
        lines += [f"without effect  {len(self.idle):>3}", *_wrapped(", ".join(self.idle))]
        idle = {*map(canonical_key, self.idle)}
        both = self.written | self.values
        lines += _differences({key: value for key, value in both.items() if key not in idle})
        return "\n".join(["# keys", *lines])


def _wrapped(text: str) -> list[str]:
    options: dict[str, Any] = {"initial_indent": "  ", "subsequent_indent": "  "}
    return textwrap.wrap(text, 98, break_on_hyphens=False, **options)


def _differences(values: Mapping[str, Any]) -> list[str]:
    """What these keys give otherwise than in GPT-NeoX, always or under a condition."""
    lines = []
    for title, certain in (("other than in GPT-NeoX", True), ("may differ from GPT-NeoX", False)):
        rows = [
            f"{', '.join(keys) if certain else row.what}: here {row.here} (GPT-NeoX: {row.there})"
            for row in DIFFERENCES
            if row.is_certain == certain and (keys := row.keys(values))
        ]
        lines += [title, *(line for row in rows for line in _wrapped(row))] if rows else []
    return [line.replace("`", "") for line in lines]


def check_page(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Print the page for a parsed command line, whose words are shown at the end."""
    if not (files := config_files(options)):
        raise ConfigError("no config file given, e.g. kerple check my.yml")
    args: NeoXArgs | None = None
    try:
        args, problems = load_config(options), ""
    except ConfigError as error:
        problems = str(error)
    layers = [parse_yaml(read_text(file), str(file)) or {} for file in files]
    resolved = {} if args is None else args.to_dict()
    keys = checked_keys([layer for layer in layers if isinstance(layer, dict)], problems, resolved)
    if args is None:
        try:
            args = NeoXArgs.from_dict(keys.values)
        except ConfigError as error:
            reasons = [line for line in str(error).splitlines() if line not in keys.refused]
            why = "\n".join(reasons or ["see above"])
            print(f"{keys.section()}\n\n# parameters, memory, launch\nnot known: {why}")
            return EXIT_USER_ERROR
    script = find_script("train.py", Path(__file__).resolve().parents[2])
    print(explain(script, args, keys.section()))
    if problems:
        print("\nnot accepted as it is: these are the numbers without the refused keys")
        return EXIT_USER_ERROR
    print(f"\nrun it: {shown_command('deepy')} train.py {shlex.join(words)}")
    return 0


def checked_keys(
    files: Sequence[Mapping[str, Any]], problems: str, resolved: Mapping[str, Any]
) -> CheckedKeys:
    """Sort the keys of the files; `problems`: why the whole is refused, else `resolved`."""
    found = CheckedKeys(refused=problems.splitlines())
    for raw_key, raw in ((key, value) for layer in files for key, value in layer.items()):
        key = canonical_key(raw_key)
        if any(_names(line, {raw_key, key}) for line in found.refused):
            continue
        values, _ = normalize({raw_key: raw}, "")
        found.values |= values
        found.written[key] = raw
        if not values or (key in OWNER and FACTS[key]["changes"] == "nothing"):
            found.idle.append(raw_key)
            continue
        name, value = next(iter(values.items()))
        value = resolved.get(name, value)
        same = name == raw_key.replace("-", "_") and _contains(value, raw)
        if same:
            found.kept.append(raw_key)
        else:
            now = dump_yaml({name: value}).strip()
            found.changed.append(f"{dump_yaml({raw_key: raw}).strip()}  ->  {now}")
    return found


def _names(line: str, keys: set[str]) -> bool:
    """Whether a line of an error is about one of the keys: `key = value` or `unknown key 'key'`."""
    which = "|".join(map(re.escape, keys))
    pattern = rf"(^|[\s,.:])({which})(\.\w+)* (=|is)|'({which})[.']|^({which}):"
    return re.search(pattern, line) is not None


def _contains(value: Any, written: Any) -> bool:
    """Whether a value is the written one; a block may have got its defaults besides."""
    if isinstance(value, dict):
        inner = underscore_keys(written)
        return isinstance(inner, dict) and all(
            item is None or _contains(value.get(name), item) for name, item in inner.items()
        )
    if isinstance(written, list) and not isinstance(value, list):
        return ",".join(map(str, written)) == value  # split
    if isinstance(value, str) and isinstance(written, str):
        return value.lower() == written.lower()  # optimizer.type
    return bool(value == written) or written is None
