"""What to build: a model's spec, and its layers as one list at GPT-NeoX's indices.

`gpt.py` builds it as one module, `training/engine.py` as DeepSpeed's pipeline.

0          Embedding                 tokens -> hidden
1          PositionTables            computes the tables; a plain function without a shared kernel
2 .. L+1   TransformerLayer
L+2        drop_tables               a function
L+3        FinalNorm
L+4        head
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import signature
from typing import Any, NamedTuple, TypeVar, cast

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from megatron.errors import ConfigError, PositionalEmbeddingError
from megatron.model.attention import SelfAttention
from megatron.model.content_positions import LayerTerms
from megatron.model.embedding import Embedding, FinalNorm, UntiedHead
from megatron.model.layer_formulas import (
    NORM_EPSILONS,
    RMSNorm,
    build_norm,
    kernel_groups,
    norm_sizes,
    pattern_places,
    per_head_starts,
)
from megatron.model.position_base import PositionalEmbedding, PositionOptions, TableEmbedding
from megatron.model.position_names import positional_embedding_class
from megatron.model.rotary_and_input_positions import (
    InputEmbedding,
    LearnedEmbedding,
    RotaryEmbedding,
)
from megatron.model.transformer import (
    MLP,
    PositionTables,
    State,
    TableNames,
    TransformerLayer,
    drop_tables,
    end_tables,
)
from megatron.mpu.collectives import SERIAL, WHOLE, SequenceParallel, TensorParallel
from megatron.mpu.parallel_layers import (
    InitMethod,
    Projections,
    VocabParallelEmbedding,
    declare,
    init_method,
    seeded_generator,
)
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.model_keys import POSITION_OPTIONS, ModelArgs
from megatron.neox_arguments.optimization_keys import OptimizationArgs
from megatron.neox_arguments.run_keys import DataArgs, RuntimeArgs
from megatron.neox_arguments.validation import describe_validation_error
from megatron.neox_arguments.values import Group, PositiveInt

try:
    from apex.normalization import FusedLayerNorm
except ImportError:
    FusedLayerNorm = None

FIRST_LAYER = 2
Position = TypeVar("Position", bound=PositionalEmbedding)


def _declared(group: type[Group], key: str) -> Any:
    """A key of another group, as it is declared there."""
    return group.model_fields[key]


class ModelSpec(ModelArgs):
    """The model's keys of a config, with the padded vocabulary and what other groups decide."""

    padded_vocab_size: PositiveInt
    seed: int = _declared(RuntimeArgs, "seed")
    checkpoint_activations: bool = _declared(OptimizationArgs, "checkpoint_activations")
    checkpoint_num_layers: int = _declared(OptimizationArgs, "checkpoint_num_layers")
    reset_attention_mask: bool = _declared(DataArgs, "reset_attention_mask")
    reset_position_ids: bool = _declared(DataArgs, "reset_position_ids")
    randomized_positions: PositiveInt | None = _declared(DataArgs, "randomized_positions")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError("\n".join(describe_validation_error(error, type(self)))) from error

    @classmethod
    def from_args(cls, args: NeoXArgs, padded_vocab_size: int) -> ModelSpec:
        """The model that a config describes."""
        groups = (args.model, args.runtime, args.optimization, args.data)
        declared = {key: value for group in groups for key, value in group}
        own = {key: declared[key] for key in cls.model_fields if key in declared}
        return cls(**own, padded_vocab_size=padded_vocab_size)

    @property
    def positions_are_told(self) -> bool:
        """Whether tokens may come with positions that are not their places in the sequence."""
        return self.reset_position_ids or self.randomized_positions is not None

    def replace(self, **changes: Any) -> ModelSpec:
        """The same model but for these keys."""
        return ModelSpec(**{**dict(self), **changes})


def keep(state: State) -> State:
    """The identity, at index 1 of a model without shared tables."""
    return state


@dataclass(frozen=True)
class Layer:
    """A layer yet to be built, so that a pipeline stage builds only its share."""

    kind: type[nn.Module]
    make: Callable[[], nn.Module]
    is_tied_head: bool = False
    """The head that uses the embedding's weights: `make` builds the embedding once more, where the
    first layer is on another stage."""
    pattern: Hashable = None
    """Layers of one kind and one pattern have the same parameters."""

    @property
    def hf_names(self) -> Mapping[str, str]:
        """How the names of its own parameters begin, here and in a Hugging Face file."""
        kind: Any = self.kind
        return {} if self.is_tied_head else kind.hf_names


class SharedKernel(NamedTuple):
    """A kernel at index 1, and the layers that use it."""

    spec: ModelSpec
    """The keys as those layers have them."""
    layers: tuple[int, ...]

    @property
    def kind(self) -> type[TableEmbedding]:
        return cast(type[TableEmbedding], positional_embedding_class(self.spec.pos_emb))


Function = Callable[[State], State | Tensor]


@dataclass(frozen=True)
class LayerFactory:
    """What each layer of a model is made of."""

    spec: ModelSpec
    tp: TensorParallel = SERIAL
    pipelined: bool = False
    sp: SequenceParallel = WHOLE

    def layers(self) -> list[Layer | Function]:
        """The list: layers, and plain functions between them."""
        return [self.layer(index) for index in range(self.spec.num_layers + 5)]

    def layer(self, index: int) -> Layer | Function:
        """What is at one place of the list."""
        number = index - FIRST_LAYER
        if index == 0:
            return Layer(Embedding, self.embedding)
        if index == 1:
            return Layer(PositionTables, self.position_tables) if self.kernels else keep
        if number < self.spec.num_layers:
            make = partial(self.transformer_layer, number)
            return Layer(TransformerLayer, make, pattern=self._places[number])
        if number == self.spec.num_layers:
            differ = self.pipelined and self.spec.layer_pattern is not None
            return end_tables if differ else drop_tables
        if number == self.spec.num_layers + 1:
            return Layer(FinalNorm, lambda: FinalNorm(self._norm()))
        if self.spec.no_weight_tying:
            return Layer(UntiedHead, self.untied_head)
        return Layer(Embedding, self.embedding, is_tied_head=True)

    @cached_property
    def _places(self) -> list[int]:
        """Which entry of layer_pattern each layer takes."""
        return pattern_places(self.spec.layer_pattern or [{}], self.spec.num_layers)

    @cached_property
    def layer_specs(self) -> list[ModelSpec]:
        """The keys as each layer has them: its entry's in layer_pattern, else the model's."""
        if self.spec.layer_pattern is None:
            return [self.spec] * self.spec.num_layers
        own = [
            self.spec.replace(
                layer_pattern=None, **{k: v for k, v in entry.items() if k != "count"}
            )
            for entry in self.spec.layer_pattern
        ]
        return [own[place] for place in self._places]

    @cached_property
    def kernels(self) -> list[SharedKernel]:
        """The kernels at index 1, each with its layers; none with kerple_share: per_layer."""
        if self.spec.kerple_share == "per_layer":
            return []
        with_tables = {
            number: spec
            for number, spec in enumerate(self.layer_specs)
            if issubclass(positional_embedding_class(spec.pos_emb), TableEmbedding)
        }
        groups = kernel_groups(with_tables, POSITION_OPTIONS)
        return [SharedKernel(self.layer_specs[used[0]], tuple(used)) for used in groups]

    def table_names(self, number: int) -> TableNames:
        """What each of the shared kernels' tables is to a layer."""
        return tuple(
            name if number in kernel.layers else None
            for kernel in self.kernels
            for name in kernel.kind.table_names
        )

    def embedding(self) -> Embedding:
        spec = self.spec
        words = VocabParallelEmbedding(
            spec.padded_vocab_size,
            spec.hidden_size,
            init=self._init(spec.init_method),
            generator=seeded_generator(spec.seed, 0, "word_embeddings"),
            tp=self.tp,
        )
        positions = self.positions(InputEmbedding, spec)
        if isinstance(positions, LearnedEmbedding) and spec.init_method != "normal":
            with torch.no_grad():
                generator = seeded_generator(spec.seed, 0, "position_embeddings")
                self._init(spec.init_method)(positions.weight, generator)
        if positions is not None and spec.positions_are_told:
            _check_restarts(positions, spec)
        return Embedding(
            words,
            positions,
            spec.hidden_dropout,
            positions_restart=spec.positions_are_told,
            sp=self.sp,
        )

    def position_tables(self) -> PositionTables:
        made = []
        for place, (spec, layers) in enumerate(self.kernels):
            # a further kernel has a draw of its own
            tables = self.positions(TableEmbedding, spec, layers[0] if place else None)
            assert tables is not None
            made.append(tables)
        return PositionTables(*made, pipelined=self.pipelined, sp=self.sp)

    def transformer_layer(self, number: int) -> TransformerLayer:
        """Layer `number` of the stack, counted from 0."""
        spec = self.spec
        linear = partial(
            Projections,
            self._init(spec.init_method),
            self._init(spec.output_layer_init_method),
            partial(seeded_generator, spec.seed, FIRST_LAYER + number),
            tp=self.tp,
        )
        mlp, own = linear(bias=spec.use_bias_in_mlp), self.layer_specs[number]
        per_layer = spec.kerple_share == "per_layer"
        shares_norm = spec.gpt_j_residual and spec.gpt_j_tied
        of_output = spec.norm_placement == "output"
        return TransformerLayer(
            input_norm=None if of_output else self._norm(),
            attention=self._attention(linear(bias=spec.use_bias_in_attn_linear), own, number),
            mlp_norm=None if shares_norm else self._norm(),
            output_norm=self._norm() if of_output else None,
            mlp=MLP(spec.hidden_size, spec.ffn_size, spec.activation_name, mlp),
            table_names=self.table_names(number),
            own_tables=self.positions(TableEmbedding, own, number) if per_layer else None,
            table_factor=spec.table_factor(number),
            hidden_dropout=spec.hidden_dropout,
            parallel_residual=spec.gpt_j_residual,
        )

    def untied_head(self) -> UntiedHead:
        spec, init, later = self.spec, self._init(self.spec.init_method), self.pipelined
        make = Projections(init, init, partial(seeded_generator, spec.seed), False, self.tp)
        what = ("final_linear", spec.hidden_size, spec.padded_vocab_size)
        by_row = spec.output_layer_parallelism == "row"
        if by_row:
            return UntiedHead(make.row(*what, input_is_split=False, vocabulary=True), in_loss=later)
        return UntiedHead(make.column(*what, vocabulary=True), in_loss=later)

    def positions(
        self, kind: type[Position], spec: ModelSpec, layer: int | None = None
    ) -> Position | None:
        """The positional embedding if it is of this kind; each `layer` has a draw of its own."""
        cls = positional_embedding_class(spec.pos_emb)
        if not issubclass(cls, kind):
            return None
        return cls(PositionOptions(spec, layer, self.tp.rank, self.tp.size))

    def layer_terms(self, spec: ModelSpec, layer: int) -> LayerTerms | None:
        """What a layer computes from its input about its scores, by the method of positions."""
        cls = positional_embedding_class(spec.pos_emb).layer_terms
        options = PositionOptions(spec, layer, self.tp.rank, self.tp.size)
        return None if cls is None else cls(options)

    def _norm(self) -> nn.Module:
        spec = self.spec
        eps = getattr(spec, NORM_EPSILONS[spec.norm])
        plain = spec.norm == "layernorm" and spec.use_bias_in_norms
        if plain and FusedLayerNorm is not None and torch.cuda.is_available():
            return FusedLayerNorm(spec.hidden_size, eps=eps)
        return build_norm(spec.norm, spec.hidden_size, eps, spec.use_bias_in_norms)

    def _init(self, name: str) -> InitMethod:
        spec = self.spec
        return init_method(
            name,
            std=spec.init_method_std,
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
        )

    def _attention(self, linear: Projections, spec: ModelSpec, number: int) -> SelfAttention:
        factor = spec.attention_temperature
        return SelfAttention(
            spec.hidden_size,
            spec.num_attention_heads,
            spec.kv_heads,
            spec.head_dim,
            linear=linear,
            rotary=self.positions(RotaryEmbedding, spec) or self._rotary_beside(spec),
            qk_norm=self._qk_norm(),
            own_norms=self._own_norms(),
            qkv_bias=spec.use_bias_in_attn_linear or spec.add_qkv_bias,
            forget_gate=spec.forget_gate,
            terms=self.layer_terms(spec, number),
            per_head=per_head_starts(spec),
            temperature=None if factor is None else (factor.floor, factor.alpha),
            documents_apart=spec.reset_attention_mask,
            positions_restart=spec.positions_are_told,
            dropout=spec.attention_dropout,
            window=spec.attention_window,
            engine=spec.engine_in_effect,
            pruning=spec.attention_pruning,
            sp=self.sp,
        )

    def _rotary_beside(self, spec: ModelSpec) -> RotaryEmbedding | None:
        """rotary_angles, as a run's first step has them."""
        share = spec.rotary_share(0)
        if not share or issubclass(positional_embedding_class(spec.pos_emb), InputEmbedding):
            return None
        return RotaryEmbedding(PositionOptions(spec, None, self.tp.rank, self.tp.size), share)

    def _own_norms(self) -> tuple[RMSNorm, RMSNorm] | None:
        """One norm for queries and one for keys."""
        sizes, eps = norm_sizes(self.spec), self.spec.rms_norm_epsilon
        return None if sizes is None else (RMSNorm(sizes[0], eps), RMSNorm(sizes[1], eps))

    def _qk_norm(self) -> nn.Module | None:
        """GPT-NeoX's: one norm for queries and keys."""
        spec = self.spec
        if not spec.use_qk_layernorm:
            return None
        shape = (spec.num_attention_heads, spec.head_dim)
        eps = getattr(spec, NORM_EPSILONS[spec.norm])
        norm = build_norm(spec.norm, shape, eps, spec.use_bias_in_norms)
        for parameter in norm.parameters():  # of two dimensions, and still no matrix
            declare(parameter, decay=False)
        return norm


def _check_restarts(embedding: InputEmbedding, spec: ModelSpec) -> None:
    """Refuse positions that are not consecutive if a user-defined method takes no `positions`."""
    if "positions" not in signature(embedding.forward).parameters:
        drawn = f"randomized_positions = {spec.randomized_positions}"
        key = "reset_position_ids = true" if spec.reset_position_ids else drawn
        raise PositionalEmbeddingError(
            f"{key} with pos_emb = {spec.pos_emb}: its forward takes no "
            "`positions`. Give it that argument ([batch, length] or None), or remove the key."
        )
