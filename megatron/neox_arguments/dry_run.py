"""What `--dry-run` prints: the resolved config and what it amounts to."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.errors import ConfigError
from megatron.neox_arguments.arguments import GROUPS, NeoXArgs
from megatron.neox_arguments.estimates import count_parameters, estimate_memory
from megatron.neox_arguments.yaml_files import dump_yaml


def dry_run_report(args: NeoXArgs, world_size: int = 1, command: Sequence[str] = ()) -> str:
    """The whole report as text."""
    sections = [
        _config_section(args),
        _parameter_section(args),
        _memory_section(args, world_size),
        _batch_section(args, world_size),
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


def _parameter_section(args: NeoXArgs) -> str:
    count = count_parameters(args)
    rows = [
        ("embedding", count.embedding),
        (f"positions ({args.model.pos_emb})", count.positions),
        (f"{args.model.num_layers} layers", count.layers),
        ("final norm", count.final_norm),
        ("head" if count.head else "head (tied to the embedding)", count.head),
        ("total", count.total),
    ]
    lines = [f"{name:34s} {number:>18,}" for name, number in rows]
    notes = [f"note: {text}" for text in count.assumptions]
    title = f"# parameters (vocabulary padded to {count.padded_vocab_size:,})"
    return "\n".join([title, *lines, *notes])


def _memory_section(args: NeoXArgs, world_size: int) -> str:
    title = f"# memory per process (ZeRO stage {args.optimization.zero_stage}, estimated)"
    try:
        memory = estimate_memory(args, world_size)
    except ConfigError as error:
        return f"{title}\nnot possible: {error}"
    rows = [
        ("parameters", memory.parameters),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("activations (rule of thumb)", memory.activations),
        ("total", memory.total),
    ]
    return "\n".join([title, *(f"{name:34s} {number / 2**30:>14.2f} GiB" for name, number in rows)])


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
    steps = args.optimization.train_iters
    if steps:
        lines.append(f"{steps:,} steps = {steps * tokens:,} tokens in all")
    elif steps == 0:
        lines.append("train_iters = 0: evaluation only")
    return "\n".join([title, *lines])
