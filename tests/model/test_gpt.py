"""The decoder: its size, its variants, and that its shortcuts do not change its numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.errors import ConfigError
from megatron.model import GPTModel, ModelSpec
from megatron.model.transformer import TransformerLayer
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.model_keys import intermediate_size_for
from tests.conftest import REPOSITORY
from tests.model.small_spec import SPEC


def tokens(batch: int = 2, length: int = 40, seed: int = 0) -> Tensor:
    return torch.randint(96, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(model: GPTModel, text: Tensor, chunk: int | None) -> dict[str, Tensor]:
    model.zero_grad()
    model.token_losses(text[:, :-1], text[:, 1:], chunk).mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_the_papers_model_has_the_papers_size() -> None:
    args = NeoXArgs.from_files([REPOSITORY / "configs" / "small_bf16.yml"])
    model = GPTModel(ModelSpec.from_args(args, padded_vocab_size=50304))
    assert model.num_parameters() == 162_322_968


@pytest.mark.parametrize(
    "change",
    [
        {"activation": "geglu"},
        {"activation": "swiglu", "norm": "rmsnorm"},
        {"activation": "relu", "norm": "scalenorm"},
        {"activation": "mish", "use_bias_in_mlp": False, "use_bias_in_attn_linear": False},
        {"gpt_j_residual": True},
        {"gpt_j_residual": True, "gpt_j_tied": True},
        {"no_weight_tying": True, "output_layer_parallelism": "row"},
        {"init_method": "small_init", "output_layer_init_method": "wang_init"},
        {"kerple_share": "per_layer"},
        {"sliding_window_width": 8},
        {"num_kv_heads": 2},
        {"num_kv_heads": 1, "hidden_dropout": 0.1, "attention_dropout": 0.1},
        {"use_qk_layernorm": True},
        {"forget_gate": True, "attention_sinks": True, "scalable_softmax": True},
        {"forget_gate": True, "attention_sinks": True, "attention_dropout": 0.1},
        {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    ],
    ids=str,
)
def test_every_variant_learns_with_all_its_parameters(change: dict[str, object]) -> None:
    model = GPTModel(SPEC.replace(**change))
    found = gradients(model, tokens(), None)
    assert set(found) == {name for name, _ in model.named_parameters()}
    assert all(bool(torch.isfinite(g).all()) and float(g.abs().sum()) > 0 for g in found.values())


def test_grouped_heads_are_heads_whose_keys_and_values_repeat() -> None:
    """Outputs and gradients against the plain model that holds each key head's rows twice."""
    grouped = GPTModel(SPEC.replace(num_kv_heads=2))
    plain = GPTModel(SPEC)
    names, heads, width = dict(grouped.named_parameters()), 4, 8
    # of each plain head its q, k, v: rows of [all q, all k, all v] with two heads of k and v
    start = [
        first
        for head in range(heads)
        for first in (head * width, (heads + head // 2) * width, (heads + 2 + head // 2) * width)
    ]
    rows = torch.cat([torch.arange(first, first + width) for first in start])
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            source = names[name]
            if "query_key_value" in name:
                source.normal_(0, 0.5, generator=torch.Generator().manual_seed(len(name)))
            parameter.copy_(source[rows] if "query_key_value" in name else source)
    text = tokens(length=37)
    torch.testing.assert_close(grouped(text), plain(text))
    found, expected = gradients(grouped, text, None), gradients(plain, text, None)
    for name, gradient in expected.items():
        if "query_key_value" in name:
            gradient = torch.zeros_like(found[name]).index_add_(0, rows, gradient)
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4)


def test_key_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="3 heads of keys"):
        GPTModel(SPEC.replace(num_kv_heads=3))


def test_fused_gelu_is_the_tanh_approximation() -> None:
    assert SPEC.replace(bias_gelu_fusion=True).activation_name == "gelu_tanh"
    assert SPEC.activation_name == "gelu"


@pytest.mark.parametrize(
    ("sizes", "width"),
    [
        ({"hidden_size": 768}, 3072),
        ({"hidden_size": 768, "activation": "swiglu"}, 1024),
        ({"hidden_size": 768, "activation": "geglu", "mlp_multiple_of": 300}, 1200),
        ({"hidden_size": 4096, "activation": "swiglu", "intermediate_size": 32768}, 10923),
        (  # llama 7B
            {
                "hidden_size": 4096,
                "activation": "swiglu",
                "intermediate_size": 32768,
                "mlp_multiple_of": 256,
            },
            11008,
        ),
        ({"intermediate_size": 100, "mlp_multiple_of": 16}, 112),
    ],
    ids=str,
)
def test_the_mlp_is_as_wide_as_in_gpt_neox(sizes: dict[str, object], width: int) -> None:
    assert SPEC.replace(**sizes).ffn_size == width


@pytest.mark.parametrize("activation", ["gelu", "swiglu", "reglu"])
@pytest.mark.parametrize("width", [1, 33, 128])
def test_every_width_has_an_intermediate_size(activation: str, width: int) -> None:
    size = intermediate_size_for(width, activation)
    assert SPEC.replace(activation=activation, intermediate_size=size).ffn_size == width


def test_a_window_shows_the_query_and_so_many_tokens_before_it() -> None:
    """As GPT-NeoX's flash-attention: a change further back is not seen."""
    model = GPTModel(SPEC.replace(num_layers=1, sliding_window_width=4)).eval()
    text = tokens()
    changed = text.clone()
    changed[:, 2] = (changed[:, 2] + 1) % SPEC.padded_vocab_size
    with torch.no_grad():
        difference = (model(text) - model(changed)).abs().amax(dim=(0, 2))
    assert (difference[2:7] > 0).all()
    assert (difference[7:] == 0).all()


def test_chunked_loss_equals_the_whole() -> None:
    model, text = GPTModel(SPEC), tokens(length=71)
    with torch.no_grad():
        whole = model.token_losses(text[:, :-1], text[:, 1:], None)
        pieces = model.token_losses(text[:, :-1], text[:, 1:], 13)
    torch.testing.assert_close(pieces, whole)
    expected = gradients(model, text, None)
    for name, gradient in gradients(model, text, 13).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


@pytest.mark.parametrize("layers_per_block", [1, 2, 3])
def test_activation_checkpointing_changes_no_gradient(layers_per_block: int) -> None:
    spec = SPEC.replace(num_layers=3, hidden_dropout=0.2, attention_dropout=0.2)
    text = tokens()
    torch.manual_seed(5)
    expected = gradients(GPTModel(spec), text, None)
    recomputing = spec.replace(checkpoint_activations=True, checkpoint_num_layers=layers_per_block)
    torch.manual_seed(5)
    for name, gradient in gradients(GPTModel(recomputing), text, None).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


def test_the_kernel_is_shared_or_each_layers_own() -> None:
    shared = [n for n, p in GPTModel(SPEC).named_parameters() if n.endswith(".r1")]
    own = GPTModel(SPEC.replace(kerple_share="per_layer"))
    assert shared == ["sequential.1.embedding.r1"]
    first, second = (p for n, p in own.named_parameters() if n.endswith(".r1"))
    assert not torch.equal(first, second)


def test_a_window_hides_what_is_farther() -> None:
    model, text = GPTModel(SPEC).eval(), tokens(batch=1)
    changed = text.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 96
    with torch.no_grad():
        assert not torch.equal(model(text)[0, -1], model(changed)[0, -1])
        model.set_window(8)  # two layers see 15 tokens back
        torch.testing.assert_close(model(text)[0, -1], model(changed)[0, -1])
        model.set_window(None)
        assert not torch.equal(model(text)[0, -1], model(changed)[0, -1])


def test_dropout_is_off_in_evaluation() -> None:
    model = GPTModel(SPEC.replace(hidden_dropout=0.5, attention_dropout=0.5)).eval()
    text = tokens()
    with torch.no_grad():
        assert torch.equal(model(text), model(text))
        model.train()
        assert not torch.equal(model(text), model(text))


def test_the_seed_decides_the_weights_and_nothing_else_does() -> None:
    torch.manual_seed(1)
    first = GPTModel(SPEC).state_dict()
    torch.manual_seed(2)
    second = GPTModel(SPEC).state_dict()
    other = GPTModel(SPEC.replace(seed=7)).state_dict()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert not torch.equal(
        first["sequential.0.word_embeddings.weight"], other["sequential.0.word_embeddings.weight"]
    )


def test_layers_are_typed_at_neox_indices() -> None:
    model = GPTModel(SPEC)
    kinds = [type(layer).__name__ for layer in model.sequential]
    assert kinds[0] == "Embedding" and kinds[1] == "PositionTables"
    assert all(isinstance(model.sequential[2 + i], TransformerLayer) for i in range(2))
    assert kinds[5] == "FinalNorm" and len(kinds) == 7


@pytest.mark.parametrize("key", ["norm", "activation", "init_method"])
def test_unknown_names_are_refused_with_the_key_and_the_choices(key: str) -> None:
    first_choice = getattr(SPEC, key)
    with pytest.raises(ConfigError, match=rf"{key} = 'batchnorm'.*{first_choice}"):
        SPEC.replace(**{key: "batchnorm"})
