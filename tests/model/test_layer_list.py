"""One declaration of a model key reaches the model, and one list of layers both its forms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.errors import ConfigError
from megatron.model import GPTModel, ModelSpec
from megatron.model.layer_list import Layer, LayerFactory
from megatron.model.position_base import PositionalEmbedding
from megatron.model.transformer import TransformerLayer
from megatron.mpu.collectives import SERIAL
from megatron.neox_arguments.model_keys import ModelArgs
from megatron.training.engine import pipeline_layers
from tests.checkpoints.small_models import small_args
from tests.model.small_spec import SPEC

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


# layer_pattern.

PATTERN: list[dict[str, Any]] = [
    {"count": 2, "pos_emb": "kerple_log", "sliding_window_width": 3, "attention_sinks": True},
    {"pos_emb": "none", "attention_temperature": {"floor": 4, "alpha": 0.7}, "forget_gate": True},
    {"pos_emb": "rpe", "rpe_num_buckets": 8, "attention_sinks": True, "forget_gate": True,
     "attention_temperature": {"floor": 2}},
    {"pos_emb": "rotary", "rotary_pct": 0.5, "sliding_window_width": 6},
    {"pos_emb": "kerple_power_ap_"},
    {"pos_emb": "kerple_log", "kerple_bias_scale": "pre"},
]  # fmt: skip


def pattern_spec(num_layers: int = 10, **changes: Any) -> ModelSpec:
    return SPEC.replace(num_layers=num_layers, layer_pattern=PATTERN, **changes)


def dense_layer(layer: TransformerLayer, keys: dict[str, Any], x: Tensor, bias: Tensor) -> Tensor:
    """One layer by hand: scores of all pairs, masks, and one softmax over keys and the sink."""
    own, length = layer.attention, x.shape[1]
    qkv = own.query_key_value(layer.input_layernorm(x))
    q, k, v = qkv.unflatten(-1, (4, 3, 8)).permute(3, 0, 2, 1, 4)
    place = torch.arange(length)
    if keys["pos_emb"] == "rotary":
        turn = place[:, None] * 10000 ** (-torch.arange(0, 4, 2) / 4)
        cos, sin = turn.cos().repeat(1, 2), turn.sin().repeat(1, 2)
        q, k = (
            torch.cat((y[..., :4] * cos + torch.cat((-y[..., 2:4], y[..., :2]), -1) * sin,
                       y[..., 4:]), -1)
            for y in (q, k)
        )  # fmt: skip
    distance = place[:, None] - place
    scores = q @ k.mT / 8**0.5 + bias[:, distance.clamp(min=0)]
    if keys.get("forget_gate"):
        gates = own.forget_gate(layer.input_layernorm(x)).sigmoid().log().mT
        sums = gates.cumsum(-1)
        scores = scores + sums[..., None] - sums[..., None, :]
    if "attention_temperature" in keys:
        floor, alpha = 1.0 * keys["attention_temperature"]["floor"], own.temperature[1]
        tau = 1 + alpha * torch.log(((place + 1) / floor).clamp(min=1))
        scores = scores * tau[:, None]
    width = keys.get("sliding_window_width", length)
    scores = scores.masked_fill((distance < 0) | (distance > width), -torch.inf)
    if keys.get("attention_sinks"):
        sink = own.sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), -1)
    out = scores.softmax(-1)[..., :length] @ v
    x = x + own.dense(out.transpose(1, 2).flatten(2))
    return x + layer.mlp(layer.post_attention_layernorm(x))


@pytest.mark.parametrize("share", ["all", "per_layer"])
def test_a_pattern_is_the_dense_model_of_its_layers(share: str) -> None:
    """Ten layers of a pattern of seven, against scores of all pairs made by hand, in float64."""
    torch.manual_seed(1)
    model = GPTModel(pattern_spec(kerple_share=share, init_method_std=0.3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.rand(parameter.shape))
    tokens = torch.randint(96, (2, 13))
    once = [entry for entry in PATTERN for _ in range(entry.get("count", 1))]
    owners = model.sequential[1].embeddings if share == "all" else []
    numbers = {"kerple_log": 0, "rpe": 1, "kerple_power_ap_": 2}

    def by_hand() -> Tensor:
        x = model.embedding(tokens)
        for number, layer in enumerate(model.layers):
            keys = once[number % 7]
            kernel = layer.positions
            if share == "all" and keys["pos_emb"] in numbers:
                pre = "kerple_bias_scale" in keys
                kernel = owners[3 if pre else numbers[keys["pos_emb"]]]
            bias = torch.zeros(4, 13) if kernel is None else kernel(13).bias
            x = dense_layer(layer, keys, x, bias.double())
        return model.head(model.sequential[-2](x))

    grads = []
    for run in (by_hand, lambda: model(tokens)):
        model.zero_grad()
        out = run()
        out.square().mean().backward()
        grads.append((out.detach(), [p.grad.clone() for p in model.parameters()]))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-6)


def test_kernels_with_the_same_options_are_shared() -> None:
    """By name and options; windows and gates do not count, nor does an alias."""
    factory = LayerFactory(pattern_spec())
    assert [kernel.layers for kernel in factory.kernels] == [(0, 1, 7, 8), (3,), (5,), (6,)]
    assert factory.table_names(3) == (None, "bias", None, None)
    kinds = [type(kernel).name for kernel in GPTModel(pattern_spec()).positional_embeddings()]
    shared = ["kerple_log", "rpe", "kerple_power", "kerple_log"]
    assert kinds == [*shared, "rotary"]
    first, *_, last = factory.position_tables().embeddings
    assert not torch.equal(first.r1, last.r1)  # a draw of its own
    alone = LayerFactory(SPEC.replace(layer_pattern=[{"sliding_window_width": 3}, {}]))
    plain = LayerFactory(SPEC).position_tables()
    assert torch.equal(alone.position_tables().embedding.r1, plain.embedding.r1)


def test_a_window_of_all_layers_is_a_pattern_of_one_entry() -> None:
    """The same parameters and the same numbers, by either key; and a layer may lift the window."""
    tokens = torch.randint(96, (1, 20))
    spec = SPEC.replace(sliding_window_width=4)
    models = [
        GPTModel(s) for s in (spec, SPEC.replace(layer_pattern=[{"sliding_window_width": 4}]))
    ]
    with torch.no_grad():
        assert torch.equal(*(model(tokens) for model in models))
    lifted = GPTModel(spec.replace(layer_pattern=[{}, {"sliding_window_width": None}]))
    assert [layer.attention.window for layer in lifted.layers] == [5, None]
    lifted.set_window(2)
    assert [layer.attention.window for layer in lifted.layers] == [2, 2]
    lifted.set_window(None)
    assert [layer.attention.window for layer in lifted.layers] == [5, None]
