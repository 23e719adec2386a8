"""One declaration of a model key reaches the model, and one list of layers both its forms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron.errors import ConfigError
from megatron.model import GPTModel, ModelSpec
from megatron.model.layer_list import Layer, LayerFactory
from megatron.model.position_base import PositionalEmbedding
from megatron.mpu.collectives import SERIAL
from megatron.neox_arguments.model_keys import ModelArgs
from megatron.training.engine import pipeline_layers
from tests.checkpoints.small_models import small_args

CHANGES = {
    "pos_emb": "rotary",
    "rope_scaling": {"type": "yarn", "factor": 4.0},
    "activation": "swiglu",
    "attention_pruning": False,
    "seed": 99,
    "checkpoint_activations": True,
    "checkpoint_num_layers": 2,
}


def test_the_spec_holds_every_model_key_as_the_config_does() -> None:
    args = small_args(**CHANGES)
    spec = ModelSpec.from_args(args, 128)
    for key in ModelArgs.model_fields:
        assert getattr(spec, key) == getattr(args.model, key), key
    assert (spec.seed, spec.padded_vocab_size) == (99, 128)
    assert (spec.checkpoint_activations, spec.checkpoint_num_layers) == (True, 2)


def test_a_bad_value_is_named_with_its_key() -> None:
    spec = ModelSpec.from_args(small_args(), 128)
    with pytest.raises(ConfigError, match="padded_vocab_size = 0"):
        spec.replace(padded_vocab_size=0)
    with pytest.raises(ConfigError, match="seed = -1"):
        spec.replace(seed=-1)


def spec_of(**changes: object) -> ModelSpec:
    return ModelSpec.from_args(small_args(num_layers=3, **changes), 128)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pos_emb", ["kerple_log", "rotary", "learned"])
def test_model_and_pipeline_are_the_same_list(pos_emb: str, tied: bool) -> None:
    spec = spec_of(pos_emb=pos_emb, no_weight_tying=not tied)
    layers = LayerFactory(spec).layers()
    piped = pipeline_layers(spec, SERIAL)
    model = GPTModel(spec)
    assert len(layers) == len(piped) == len(model.sequential) == spec.num_layers + 5
    for layer, pipe, built in zip(layers, piped, model.sequential, strict=True):
        if isinstance(layer, Layer):
            assert pipe.kind is layer.kind
            assert layer.is_tied_head or type(built) is layer.kind
        else:
            assert pipe is layer and built.function is layer
    assert sum(isinstance(layer, Layer) and layer.is_tied_head for layer in layers) == tied


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    built: list[str] = []
    begin = PositionalEmbedding.__init__

    def count(self: PositionalEmbedding, options: object) -> None:
        built.append(type(self).name)
        begin(self, options)

    with monkeypatch.context() as patch:
        patch.setattr(PositionalEmbedding, "__init__", count)
        yield built


@pytest.mark.parametrize(
    ("pos_emb", "share", "expected"),
    [
        ("learned", "all", 1),
        ("sinusoidal", "all", 1),
        ("kerple_log", "all", 1),
        ("kerple_log", "per_layer", 3),
        ("rotary", "all", 3),
        ("none", "all", 0),
    ],
)
def test_no_positional_embedding_is_thrown_away(
    monkeypatch: pytest.MonkeyPatch, pos_emb: str, share: str, expected: int
) -> None:
    with counted(monkeypatch) as built:
        model = GPTModel(spec_of(pos_emb=pos_emb, kerple_share=share))
    assert len(built) == expected == len(list(model.positional_embeddings()))
