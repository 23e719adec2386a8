"""How large a config's model is: its parameters, counted in its outline, and bytes per process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import nn

from megatron.atomic_files import read_json
from megatron.backends.optimizers import build_optimizer, measured_state_bytes
from megatron.errors import ConfigError
from megatron.model.layer_list import ModelSpec
from megatron.model.outline import ModelOutline, outline_of
from megatron.model.position_base import PositionalEmbedding
from megatron.mpu.parallel_layers import parameter_facts
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.deepspeed_config import OptimizerBlock, optimizer_kind
from megatron.neox_arguments.model_keys import padded_vocab_size
from megatron.neox_arguments.optimization_keys import data_parallel_size
from megatron.neox_arguments.run_keys import TokenizerArgs

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


def _vocabulary_size(tokenizer: TokenizerArgs) -> tuple[int, list[str]]:
    """The size of the vocabulary, and the assumption made if it is not known without a file."""
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


def outline_of_config(args: NeoXArgs) -> tuple[ModelOutline, list[str]]:
    """The model that a config describes, and what was assumed of its vocabulary."""
    size, assumptions = _vocabulary_size(args.tokenizer)
    padded = padded_vocab_size(
        size, args.model.make_vocab_size_divisible_by, args.parallel.model_parallel_size
    )
    return outline_of(ModelSpec.from_args(args, padded)), assumptions


def count_parameters(args: NeoXArgs) -> ParameterCount:
    """Parameters of the model that a config describes."""
    outline, assumptions = outline_of_config(args)
    counts = [(_count(layer), _count_positions(layer)) for layer in outline.layers()]
    own = [total - positions for total, positions in counts]
    return ParameterCount(
        embedding=own[0],
        positions=sum(positions for _, positions in counts),
        layers=sum(own[1:-2]),
        final_norm=own[-2],
        head=own[-1],
        padded_vocab_size=outline.spec.padded_vocab_size,
        assumptions=tuple(assumptions),
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _count_positions(module: nn.Module) -> int:
    return sum(_count(part) for part in module.modules() if isinstance(part, PositionalEmbedding))


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
    block = optimization.optimizer
    if (fewer := len(block.states or ()) - len(block.linear_states or ())) > 0:
        states -= 4 * fewer * _linear_share(args)
    elif optimization.use_bnb_optimizer:
        states -= share * 6  # a byte for each of two states
    return MemoryEstimate(
        parameters=share * (2 if half else 4) // (copies if stage == 3 else 1),
        gradients=share * ((2 if half else 4) + sums) // (copies if stage >= 2 else 1),
        optimizer=states // (copies if stage >= 1 else 1),
        activations=_activation_bytes(args, world_size),
    )


def cache_bytes(args: NeoXArgs, tokens: int) -> int:
    """Of the keys and values of one sequence in generation: a layer with a window keeps its own."""
    outline, _ = outline_of_config(args)
    windows = [spec.attention_window for spec in outline.layer_specs]
    kept = sum(tokens if window is None else min(tokens, window) for window in windows)
    width = 4 if args.optimization.precision == "fp32" else 2
    return 2 * kept * args.model.kv_heads * args.model.head_dim * width


def _linear_share(args: NeoXArgs) -> int:
    """Elements of linear layers' matrices on one process."""
    layers = outline_of_config(args)[0].layers()
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    linear = [p for p in parameters if parameter_facts(p).is_linear(p.shape)]
    return sum(p.numel() for p in linear) // args.parallel.processes_per_replica


def optimizer_bytes(block: OptimizerBlock) -> float:
    """Bytes of optimizer state per parameter; of a user-defined class, measured."""
    if block.states is not None:
        return 4 * len(block.states)
    kind, params = optimizer_kind(block), block.params.model_dump(exclude_none=True)
    return measured_state_bytes(lambda groups: build_optimizer(kind, groups, params))


def memory_shortage(args: NeoXArgs, world_size: int, available: int, where: str) -> str | None:
    """An error text if weights, gradients and optimizer do not fit into `available` bytes.

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
    tokens = micro * model.seq_length // args.parallel.sequence_parallel_size
    layer = 17 * tokens * model.hidden_size * width // args.parallel.model_parallel_size
    if model.engine_in_effect == "naive":
        ranks = args.parallel.model_parallel_size * args.parallel.sequence_parallel_size
        heads = model.num_attention_heads // ranks
        layer += 2 * micro * heads * model.seq_length**2 * width
    layers = -(-model.num_layers // max(args.parallel.pipe_parallel_size, 1))
    if args.optimization.checkpoint_activations:
        return layers * tokens * model.hidden_size * width + layer
    return layers * layer
