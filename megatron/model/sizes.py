"""How large a config's model is: its parameters, counted in its outline, and bytes per process."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from torch import nn

from megatron.atomic_files import read_json
from megatron.backends.optimizers import build_optimizer, measured_state_bytes
from megatron.errors import ConfigError
from megatron.model.layer_list import ModelSpec
from megatron.model.outline import outline_of
from megatron.model.position_base import PositionalEmbedding
from megatron.mpu.parallel_layers import parameter_facts
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.deepspeed_config import OptimizerBlock, optimizer_kind
from megatron.neox_arguments.optimization_keys import data_parallel_size, plan_batch
from megatron.neox_arguments.run_keys import TokenizerArgs

ASSUMED_VOCABULARY = 50257  # GPT-2's
KNOWN_VOCABULARIES = {
    "GPT2BPETokenizer": ASSUMED_VOCABULARY,
    "HFGPT2Tokenizer": ASSUMED_VOCABULARY + 1,
    "CharLevelTokenizer": 512,
}


class ParameterCount(NamedTuple):
    """Parameters by part of the model."""

    embedding: int
    positions: int
    layers: int
    final_norm: int
    head: int

    @property
    def total(self) -> int:
        return sum(self)


class MemoryEstimate(NamedTuple):
    """Bytes per process. Activations are a rule of thumb; the rest is arithmetic."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return sum(self)


class ModelSizes:
    """The sizes of a config's model, and what its training takes of a process."""

    def __init__(self, args: NeoXArgs) -> None:
        size, self.assumptions = _vocabulary_size(args.tokenizer)
        self.optimization, self.parallel = args.optimization, args.parallel
        self.outline = outline_of(ModelSpec.from_args(args, args.padded_vocabulary(size)))

    @property
    def spec(self) -> ModelSpec:
        return self.outline.spec

    @cached_property
    def parameters(self) -> ParameterCount:
        counts = [(_count(layer), _count_positions(layer)) for layer in self.outline.layers()]
        own = [total - positions for total, positions in counts]
        return ParameterCount(
            embedding=own[0],
            positions=sum(positions for _, positions in counts),
            layers=sum(own[1:-2]),
            final_norm=own[-2],
            head=own[-1],
        )

    def memory(self, world_size: int) -> MemoryEstimate:
        """Bytes that training takes on one process."""
        share = -(-self.parameters.total // self.parallel.processes_per_replica)
        copies = data_parallel_size(self.parallel, world_size)
        optimization = self.optimization
        stage, half = optimization.zero_stage_in_effect, optimization.precision != "fp32"
        # bf16's gradients are added up in fp32 beside them.
        beside = optimization.precision == "bf16" and optimization.accumulation_dtype == "fp32"
        sums = 4 if beside else 0
        # 16-bit training keeps an fp32 copy beside the optimizer's own states.
        states = int(share * (optimizer_bytes(optimization.optimizer) + (4 if half else 0)))
        block = optimization.optimizer
        if (fewer := len(block.states or ()) - len(block.linear_states or ())) > 0:
            states -= 4 * fewer * self._linear_share()
        elif optimization.use_bnb_optimizer:
            states -= share * 6  # a byte for each of two states
        return MemoryEstimate(
            parameters=share * (2 if half else 4) // (copies if stage == 3 else 1),
            gradients=share * ((2 if half else 4) + sums) // (copies if stage >= 2 else 1),
            optimizer=states // (copies if stage >= 1 else 1),
            activations=self._activation_bytes(world_size),
        )

    def shortage(self, world_size: int, available: int, where: str) -> str | None:
        """An error text if weights, gradients and optimizer do not fit into `available` bytes.

        Activations are left out: their estimate is a rule of thumb, the rest is arithmetic.
        """
        needed = self.memory(world_size)
        states = needed.parameters + needed.gradients
        if not self.optimization.zero_optimization.offloads_optimizer:
            states += needed.optimizer
        if states <= available:
            return None
        return (
            f"a model of {self.parameters.total / 1e9:.3g} billion parameters needs "
            f"{states / 2**30:,.1f} GiB per process for weights, gradients and optimizer; {where} "
            f"has {available / 2**30:,.1f} GiB. Use more processes with model_parallel_size, "
            "pipe_parallel_size or zero_optimization, or a smaller model."
        )

    def cache_bytes(self, tokens: int) -> int:
        """Of one sequence's keys and values in generation: a layer with a window keeps its own."""
        windows = [spec.attention_window for spec in self.outline.layer_specs]
        kept = sum(tokens if window is None else min(tokens, window) for window in windows)
        return 2 * kept * self.spec.kv_heads * self.spec.head_dim * self._width

    @property
    def _width(self) -> int:
        """Bytes of an activation."""
        return 4 if self.optimization.precision == "fp32" else 2

    def _linear_share(self) -> int:
        """Elements of linear layers' matrices on one process."""
        layers = self.outline.layers()
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        linear = [p for p in parameters if parameter_facts(p).is_linear(p.shape)]
        return sum(p.numel() for p in linear) // self.parallel.processes_per_replica

    def _activation_bytes(self, world_size: int) -> int:
        """About 17 hidden-sized values per token and layer; the attention engines keep no L x L."""
        model, parallel, width = self.spec, self.parallel, self._width
        try:
            micro = plan_batch(self.optimization, parallel, world_size).micro_batch_size
        except ConfigError:
            micro = 1
        tokens = micro * model.seq_length // parallel.sequence_parallel_size
        layer = 17 * tokens * model.hidden_size * width // parallel.model_parallel_size
        if model.engine_in_effect == "naive":
            ranks = parallel.model_parallel_size * parallel.sequence_parallel_size
            heads = model.num_attention_heads // ranks
            layer += 2 * micro * heads * model.seq_length**2 * width
        layers = -(-model.num_layers // max(parallel.pipe_parallel_size, 1))
        if self.optimization.checkpoint_activations:
            return layers * tokens * model.hidden_size * width + layer
        return layers * layer


def _vocabulary_size(tokenizer: TokenizerArgs) -> tuple[int, tuple[str, ...]]:
    """The size of the vocabulary, and the assumption made if it is not known without a file."""
    kind, file = tokenizer.tokenizer_type, tokenizer.vocab_file
    if tokenizer.vocab_size is not None:
        return tokenizer.vocab_size, ()
    if kind == "GPT2BPETokenizer" and file is not None:
        if entries := read_json(Path(file).expanduser()):
            return len(entries), ()
    elif kind in KNOWN_VOCABULARIES:
        return KNOWN_VOCABULARIES[kind], ()
    assumed = f"vocabulary of {ASSUMED_VOCABULARY} assumed ({kind} is not opened here)"
    return ASSUMED_VOCABULARY, (assumed,)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _count_positions(module: nn.Module) -> int:
    return sum(_count(part) for part in module.modules() if isinstance(part, PositionalEmbedding))


def optimizer_bytes(block: OptimizerBlock) -> float:
    """Bytes of optimizer state per parameter; of a user-defined class, measured."""
    if block.states is not None:
        return 4 * len(block.states)
    kind, params = optimizer_kind(block), block.params.model_dump(exclude_none=True)
    return measured_state_bytes(lambda groups: build_optimizer(kind, groups, params))
