"""What `--dry-run` prints: the resolved config, and what it amounts to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.errors import ConfigError
from megatron.machine import count_gpus, memory_bytes
from megatron.model.layer_formulas import pattern_places
from megatron.model.outline import layer_ranges, position_label
from megatron.model.sizes import (
    cache_bytes,
    count_parameters,
    estimate_memory,
    memory_shortage,
    outline_of_config,
)
from megatron.neox_arguments.arguments import GROUPS, NeoXArgs
from megatron.neox_arguments.catalogue import label_of
from megatron.neox_arguments.run_keys import DataArgs, TokenizerArgs
from megatron.neox_arguments.yaml_files import dump_yaml

NAMED_VOCABULARIES = ("HFGPT2Tokenizer", "TiktokenTokenizer")
"""Tokenizers whose vocab_file may be a name that their library knows, and no file."""


def dry_run_report(args: NeoXArgs, world_size: int = 1, command: Sequence[str] = ()) -> str:
    """The whole report as text."""
    sections = [
        _config_section(args),
        *([_layer_section(args)] if args.model.layer_pattern else []),
        _parameter_section(args),
        _memory_section(args, world_size),
        _batch_section(args, world_size),
        _files_section(args.tokenizer, args.data),
    ]
    if command:
        sections.append("# launch command\n" + " ".join(command))
    return "\n\n".join(sections)


def _config_section(args: NeoXArgs) -> str:
    parts = ["# resolved config"]
    for name in GROUPS:
        values = getattr(args, name).model_dump(exclude_none=True)
        parts.append(f"# {name}\n" + dump_yaml(values).rstrip())
    return "\n".join([*parts, f"# config hash {args.config_hash()}"])


def _layer_section(args: NeoXArgs) -> str:
    """Which layers have which keys of layer_pattern, and which kernels they share."""
    outline, _ = outline_of_config(args)
    pattern, number = args.model.layer_pattern or [], args.model.num_layers
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
    return "\n".join(["# layers, from 0", *rows, *kernels])


def _parameter_section(args: NeoXArgs) -> str:
    count = count_parameters(args)
    rows = [
        ("embedding", count.embedding),
        (f"positions ({position_label(args.model)})", count.positions),
        (f"{args.model.num_layers} layers", count.layers),
        ("final norm", count.final_norm),
        ("head" if count.head else "head (tied to the embedding)", count.head),
        ("total", count.total),
    ]
    width = max(34, *(len(name) for name, _ in rows))
    lines = [f"{name:{width}s} {number:>18,}" for name, number in rows]
    notes = [f"note: {text}" for text in count.assumptions]
    title = f"# parameters (vocabulary padded to {count.padded_vocab_size:,})"
    return "\n".join([title, *lines, *notes])


def _memory_section(args: NeoXArgs, world_size: int) -> str:
    title = f"# memory per process (ZeRO stage {args.optimization.zero_stage_in_effect}, estimated)"
    try:
        memory = estimate_memory(args, world_size)
    except ConfigError as error:
        return f"{title}\nnot possible: {error}"
    names = ("parameters", "gradients", "optimizer", "activations (rule of thumb)", "total")
    rows = zip(names, (*memory, memory.total), strict=True)
    lines = [f"{name:34s} {number / 2**30:>14.2f} GiB" for name, number in rows]
    tokens = args.model.seq_length
    cached = f"{cache_bytes(args, tokens) / 2**20:>14.2f} MiB"
    lines.append(f"{f'KV cache of {tokens:,} tokens, generating':34s} {cached}")
    return "\n".join([title, *lines, *_here(args, world_size)])


def _here(args: NeoXArgs, world_size: int) -> list[str]:
    """How that compares with this machine, unless it has GPUs, whose memory is not asked here."""
    available = memory_bytes()
    if available is None or count_gpus():
        return []
    line = f"{'this machine, without a GPU':34s} {available / 2**30:>14.2f} GiB"
    shortage = memory_shortage(args, world_size, available, "this machine")
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


def _batch_section(args: NeoXArgs, world_size: int) -> str:
    title = f"# batch on {world_size} process{'es' if world_size > 1 else ''}"
    try:
        plan = args.batch_plan(world_size)
    except ConfigError as error:
        return f"{title}\nnot possible: {error}"
    tokens = plan.train_batch_size * args.model.seq_length
    lines = [
        f"{plan.micro_batch_size} sequences x {plan.gradient_accumulation_steps} accumulation "
        f"x {plan.data_parallel_size} data-parallel = {plan.train_batch_size} sequences per step",
        f"{plan.train_batch_size} x {args.model.seq_length} = {tokens:,} tokens per step",
    ]
    if (shared := args.parallel.sequence_parallel_size) > 1:
        heads = args.model.num_attention_heads // args.parallel.model_parallel_size // shared
        lines.append(
            f"{shared} processes share each sequence: {args.model.seq_length // shared} positions "
            f"each and, in attention, {heads} heads"
        )
    outline, _ = outline_of_config(args)
    flops = 3 * outline.flops_per_token(args.model.seq_length)
    lines.append(f"{flops:.3g} flops per token, forward and backward")
    steps = args.optimization.train_iters
    if steps:
        lines.append(f"{steps:,} steps = {steps * tokens:,} tokens in all")
    elif epochs := args.optimization.train_epochs:
        lines.append(f"train_epochs = {epochs}: the number of steps follows from the data")
    elif steps == 0:
        lines.append("train_iters = 0: evaluation only")
    return "\n".join([title, *lines])
