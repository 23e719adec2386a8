"""What `--dry-run` prints: the resolved config, and counts computed without building the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron.atomic_files import read_json
from megatron.errors import ConfigError
from megatron.machine import count_gpus, memory_bytes
from megatron.neox_arguments.arguments import GROUPS, NeoXArgs
from megatron.neox_arguments.catalogue import label_of, method
from megatron.neox_arguments.deepspeed_config import OptimizerBlock, optimizer_kind
from megatron.neox_arguments.model_keys import GATED_ACTIVATIONS, ModelArgs, padded_vocab_size
from megatron.neox_arguments.optimization_keys import data_parallel_size
from megatron.neox_arguments.run_keys import DataArgs, TokenizerArgs
from megatron.neox_arguments.yaml_files import dump_yaml

NAMED_VOCABULARIES = ("HFGPT2Tokenizer", "TiktokenTokenizer")
"""Tokenizers whose vocab_file may be a name that their library knows, and no file."""


def dry_run_report(args: NeoXArgs, world_size: int = 1, command: Sequence[str] = ()) -> str:
    """The whole report as text."""
    sections = [
        _config_section(args),
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


def _parameter_section(args: NeoXArgs) -> str:
    count = count_parameters(args)
    rows = [
        ("embedding", count.embedding),
        (f"positions ({label_of(args.model.pos_emb)})", count.positions),
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
    steps = args.optimization.train_iters
    if steps:
        lines.append(f"{steps:,} steps = {steps * tokens:,} tokens in all")
    elif steps == 0:
        lines.append("train_iters = 0: evaluation only")
    return "\n".join([title, *lines])


# How large it is: parameters, memory, tokens.

ASSUMED_VOCABULARY = 50257  # GPT-2's
KNOWN_VOCABULARIES = {
    "GPT2BPETokenizer": ASSUMED_VOCABULARY,
    "HFGPT2Tokenizer": ASSUMED_VOCABULARY + 1,
    "CharLevelTokenizer": 512,
}


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by part of the model; `assumptions` says what was guessed."""

    embedding: int
    positions: int
    layers: int
    final_norm: int
    head: int
    padded_vocab_size: int
    assumptions: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return self.embedding + self.positions + self.layers + self.final_norm + self.head


def _norm_parameters(model: ModelArgs) -> int:
    if model.norm in ("scalenorm", "non_parametric_layernorm"):
        return 1 if model.norm == "scalenorm" else 0
    if model.norm == "rmsnorm":
        return model.hidden_size
    return model.hidden_size * (2 if model.use_bias_in_norms else 1)


def _layer_parameters(model: ModelArgs) -> int:
    hidden, ffn = model.hidden_size, model.ffn_size
    projected = hidden + 2 * model.kv_heads * model.head_dim
    attention = (projected + hidden) * hidden
    if model.use_bias_in_attn_linear:
        attention += projected + hidden
    if model.use_qk_layernorm:
        attention += _norm_parameters(model)
    if model.forget_gate:
        attention += (hidden + 1) * model.num_attention_heads
    attention += model.num_attention_heads * (model.attention_sinks + model.scalable_softmax)
    parts = 2 if model.activation in GATED_ACTIVATIONS else 1
    mlp = (parts + 1) * hidden * ffn
    if model.use_bias_in_mlp:
        mlp += parts * ffn + hidden
    norms = 1 if model.gpt_j_tied and model.gpt_j_residual else 2
    return attention + mlp + norms * _norm_parameters(model)


def _vocabulary_size(tokenizer: TokenizerArgs) -> tuple[int, list[str]]:
    """The entries of the vocabulary, and what was assumed where no file says them at once."""
    kind, file = tokenizer.tokenizer_type, tokenizer.vocab_file
    if tokenizer.vocab_size is not None:
        return tokenizer.vocab_size, []
    if kind == "GPT2BPETokenizer" and file is not None:
        if entries := read_json(Path(file).expanduser()):
            return len(entries), []
    elif kind in KNOWN_VOCABULARIES:
        return KNOWN_VOCABULARIES[kind], []
    return ASSUMED_VOCABULARY, [
        f"vocabulary of {ASSUMED_VOCABULARY} assumed ({kind} is not opened here)"
    ]


def count_parameters(args: NeoXArgs) -> ParameterCount:
    """Parameters of the model a config describes, without building it."""
    model = args.model
    size, assumptions = _vocabulary_size(args.tokenizer)
    padded = padded_vocab_size(
        size, model.make_vocab_size_divisible_by, args.parallel.model_parallel_size
    )
    position = method(model.pos_emb)
    if position is None:
        assumptions.append(f"parameters of pos_emb {model.pos_emb} not counted")
    matrix = padded * model.hidden_size
    return ParameterCount(
        embedding=matrix,
        positions=position.parameters(model) if position else 0,
        layers=model.num_layers * _layer_parameters(model),
        final_norm=_norm_parameters(model),
        head=matrix if model.no_weight_tying else 0,
        padded_vocab_size=padded,
        assumptions=tuple(assumptions),
    )


class MemoryEstimate(NamedTuple):
    """Bytes per process. Activations are a rule of thumb; the rest is arithmetic."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return sum(self)


def estimate_memory(args: NeoXArgs, world_size: int) -> MemoryEstimate:
    """Bytes that training takes on one process."""
    share = -(-count_parameters(args).total // args.parallel.processes_per_replica)
    copies = data_parallel_size(args.parallel, world_size)
    optimization = args.optimization
    stage, half = optimization.zero_stage_in_effect, optimization.precision != "fp32"
    # bf16's gradients are added up in fp32 beside them.
    beside = optimization.precision == "bf16" and optimization.accumulation_dtype == "fp32"
    sums = 4 if beside else 0
    # 16-bit training keeps an fp32 copy beside the optimizer's own states.
    states = int(share * (optimizer_bytes(optimization.optimizer) + (4 if half else 0)))
    return MemoryEstimate(
        parameters=share * (2 if half else 4) // (copies if stage == 3 else 1),
        gradients=share * ((2 if half else 4) + sums) // (copies if stage >= 2 else 1),
        optimizer=states // (copies if stage >= 1 else 1),
        activations=_activation_bytes(args, world_size),
    )


def optimizer_bytes(block: OptimizerBlock) -> float:
    """What the optimizer keeps for each parameter; of a class of the user's own, measured."""
    if block.states is not None:
        return 4 * len(block.states)
    from megatron.backends.optimizers import build_optimizer, measured_state_bytes

    kind, params = optimizer_kind(block), block.params.model_dump(exclude_none=True)
    return measured_state_bytes(lambda groups: build_optimizer(kind, groups, params))


def memory_shortage(args: NeoXArgs, world_size: int, available: int, where: str) -> str | None:
    """What to say if weights, gradients and optimizer alone cannot fit into `available` bytes.

    Activations are left out: their estimate is a rule of thumb, the rest is arithmetic.
    """
    needed = estimate_memory(args, world_size)
    states = needed.parameters + needed.gradients
    if not args.optimization.zero_optimization.offloads_optimizer:
        states += needed.optimizer
    if states <= available:
        return None
    count = count_parameters(args).total
    return (
        f"a model of {count / 1e9:.3g} billion parameters needs {states / 2**30:,.1f} GiB per "
        f"process for weights, gradients and optimizer; {where} has {available / 2**30:,.1f} GiB. "
        "Use more processes with model_parallel_size, pipe_parallel_size or zero_optimization, or "
        "a smaller model."
    )


def _activation_bytes(args: NeoXArgs, world_size: int) -> int:
    """About 17 hidden-sized values per token and layer; the attention engines keep no L x L."""
    model = args.model
    try:
        micro = args.batch_plan(world_size).micro_batch_size
    except ConfigError:
        micro = 1
    width = 4 if args.optimization.precision == "fp32" else 2
    tokens = micro * model.seq_length
    layer = 17 * tokens * model.hidden_size * width // args.parallel.model_parallel_size
    if model.attention_dropout > 0 or model.engine_in_effect == "naive":
        heads = model.num_attention_heads // args.parallel.model_parallel_size
        layer += 2 * micro * heads * model.seq_length**2 * width
    layers = -(-model.num_layers // max(args.parallel.pipe_parallel_size, 1))
    if args.optimization.checkpoint_activations:
        return layers * tokens * model.hidden_size * width + layer
    return layers * layer
