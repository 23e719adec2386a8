"""A config's model without its numbers: its layers on device meta, with names, facts and counts.

The canonical name of a parameter is `<layer index>.<name inside the layer>`, as in our own model:

    0.word_embeddings.weight          1.embedding.r1           (kernel shared by all layers)
                                      1.embedding.0.r1         (one of several, shared by some)
    2.attention.query_key_value.bias  2.positions.r1           (kernel of one layer)
    L+3.norm.weight                   L+4.final_linear.weight

A parameter's facts are declared where it is made (`ParameterFacts`); a module that multiplies
matrices counts its flops itself (`own_flops`). Here they are only collected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import nn

from megatron.errors import ConfigError
from megatron.model.embedding import Embedding, TiedHead
from megatron.model.layer_list import FIRST_LAYER, Layer, LayerFactory, ModelSpec, Position
from megatron.model.position_base import TableEmbedding
from megatron.model.position_names import positional_embedding_class
from megatron.mpu.parallel_layers import ParameterFacts, parameter_facts
from megatron.neox_arguments.layer_pattern import positions_named
from megatron.neox_arguments.model_keys import ModelArgs


def split_name(name: str) -> tuple[int, str]:
    """`12.mlp.dense_h_to_4h.bias` -> 12 and the rest."""
    index, _, rest = name.partition(".")
    return int(index), rest


def is_of_kernel(name: str) -> bool:
    """Whether a weight is a kernel's, shared by all layers or of one layer."""
    return split_name(name)[1].startswith(("embedding.", "positions."))


def is_of_positions(name: str) -> bool:
    """Whether a weight is of the positions: a kernel's, a learned vector's or a layer's terms'."""
    rest = split_name(name)[1]
    return is_of_kernel(name) or rest.startswith(("position_embeddings.", "attention.terms."))


def layer_ranges(numbers: Iterable[int]) -> str:
    """`layers 1-5, 7` for a list of layers; empty for none.

    The numbers count from 0, as in names of weights and metrics. What people read counts layers
    and heads from 1.
    """
    runs: list[list[int]] = []
    for number in (number + 1 for number in numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    told = [f"{first}-{last}" if last > first else f"{first}" for first, last in runs]
    one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"layer{'' if one else 's'} {', '.join(told)}" if told else ""


Facts = dict[str, ParameterFacts]
"""By name inside a layer."""


class _MetaFactory(LayerFactory):
    def positions(
        self, kind: type[Position], spec: ModelSpec, layer: int | None = None
    ) -> Position | None:
        try:
            return super().positions(kind, spec, layer)
        except RuntimeError:  # a user-defined class that needs real values in its constructor
            with torch.device("cpu"):
                return super().positions(kind, spec, layer)


class ModelOutline:
    """The layers of a whole model on device meta; of those with one pattern, one is built."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._factory = _MetaFactory(spec)
        self._built: dict[Any, nn.Module] = {}

    def layer(self, index: int) -> nn.Module | None:
        """The layer at this index; None for a plain function, and outside the list."""
        layer = self._factory.layer(index) if 0 <= index < self._length else None
        if not isinstance(layer, Layer):
            return None
        key = (layer.kind, layer.is_tied_head, layer.pattern)
        if key not in self._built:
            tied = layer.is_tied_head
            made = TiedHead(cast(Embedding, self.layer(0))) if tied else self._on_meta(layer.make)
            self._built[key] = made
        return self._built[key]

    @property
    def _length(self) -> int:
        return self.spec.num_layers + 5

    def layers(self) -> Iterator[nn.Module]:
        """All layers in order; one that is built once may come several times."""
        found = (self.layer(index) for index in range(self._length))
        return (layer for layer in found if layer is not None)

    @cached_property
    def kernel(self) -> Facts:
        """The facts of the parameters of pos_emb's kernel by their names; empty without tables."""
        make = partial(self._factory.positions, TableEmbedding, self.spec)
        return _facts_in(self._on_meta(lambda: make() or nn.Module()))

    @property
    def layer_specs(self) -> list[ModelSpec]:
        """The model's keys as each layer has them."""
        return self._factory.layer_specs

    def kernels(self) -> list[tuple[str, ModelSpec, tuple[int, ...]]]:
        """Each kernel: how its parameters' names begin, its keys, and its layers, from 0."""
        shared = self._factory.kernels
        if shared:
            several = len(shared) > 1
            return [
                (f"1.embedding.{place}." if several else "1.embedding.", *kernel)
                for place, kernel in enumerate(shared)
            ]
        return [
            (f"{FIRST_LAYER + number}.positions.", spec, (number,))
            for number, spec in enumerate(self.layer_specs)
            if issubclass(positional_embedding_class(spec.pos_emb), TableEmbedding)
        ]

    def facts_in_layer(self, index: int) -> Facts:
        """The facts of one layer's parameters."""
        module = self.layer(index)
        return {} if module is None else _facts_in(module)

    def facts(self, name: str) -> ParameterFacts:
        """The facts of a canonical name; the defaults if the model has no such parameter.

        A kernel's parameter is known at index 1 and in every layer: files differ in that.
        """
        index, rest = split_name(name)
        found = self.facts_in_layer(index).get(rest)
        if found is None and is_of_kernel(name):
            found = self.kernel.get(rest.partition(".")[2])
        return found or ParameterFacts()

    def flops_per_token(self, length: int) -> float:
        """Of the forward pass of one token in a sequence; the backward pass has twice as many."""
        modules: Iterator[Any] = (part for layer in self.layers() for part in layer.modules())
        return sum(part.own_flops(length) for part in modules if hasattr(part, "own_flops"))

    def training_flops_per_token(self, length: int) -> float:
        """With the backward pass."""
        return 3 * self.flops_per_token(length)

    def _on_meta(self, make: Callable[[], nn.Module]) -> nn.Module:
        try:
            with torch.device("meta"):
                return make()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"hidden_size = {self.spec.hidden_size} with vocab_size padded to "
                f"{self.spec.padded_vocab_size}: no such model can be built ({reason})"
            ) from error


def _facts_in(module: nn.Module) -> Facts:
    return {name: parameter_facts(parameter) for name, parameter in module.named_parameters()}


_OUTLINES: dict[Any, ModelOutline] = {}


def outline_of(model: ModelArgs) -> ModelOutline:
    """The outline of a config's model, cached.

    Without a vocabulary (no ModelSpec), its counts are not those of the model; its facts are.
    """
    values = {**dict(model), "seed": 0}
    spec = ModelSpec(**{"padded_vocab_size": 1, **values})
    named = [spec.pos_emb, *positions_named(values)]
    classes = tuple(positional_embedding_class(name) for name in named if name is not None)
    key = (classes, repr(spec))
    if key not in _OUTLINES:
        if len(_OUTLINES) >= 64:
            _OUTLINES.clear()
        _OUTLINES[key] = ModelOutline(spec)
    return _OUTLINES[key]
