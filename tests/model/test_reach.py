"""The reach of a kernel: farther keys have the weight 0, and a cache without them loses nothing."""

from __future__ import annotations

import pytest
import torch

from megatron.generation import generate
from megatron.generation.decoding import read_prompts
from megatron.model import GPTModel, ModelSpec, transformer
from megatron.model.reach import _largest_score
from tests.evaluation.helpers import sharpened


def steep_model(pos_emb: str = "kerple_power", slope: float = 4.0, **changes: object) -> GPTModel:
    """A model whose kernel falls by `slope` a token; heads differ."""
    keys = {
        "padded_vocab_size": 64,
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "pos_emb": pos_emb,
    }
    model = sharpened(GPTModel(ModelSpec(**{**keys, **changes}))).eval()
    slopes = slope * torch.tensor([1.0, 1.5, 2.0, 2.5])
    with torch.no_grad():
        for kernel in model.positional_embeddings():
            for name, value in kernel.named_parameters():
                value.copy_(slopes.view_as(value) if name == "r1" else torch.ones_like(value))
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "rmsnorm", "num_kv_heads": 2},
        {"kerple_share": "per_layer", "attention_sinks": True},
    ],
)
def test_a_cache_keeps_the_reach_and_the_tokens_stay_the_same(changes: dict[str, object]) -> None:
    model = steep_model(**changes)
    bounds = [layer.window for layer in model.new_cache().layers]
    assert all(bound is not None and 26 <= bound <= 160 for bound in bounds), bounds
    prompts = torch.randint(64, (400,)).tolist(), torch.randint(64, (7,)).tolist()
    logits, cache = read_prompts(model, prompts)
    assert [layer.kept for layer in cache.layers] == bounds
    with torch.no_grad():
        whole = [model(torch.tensor([prompt]))[0, -1] for prompt in prompts]
    torch.testing.assert_close(logits, torch.stack(whole), atol=1e-5, rtol=1e-5)
    expected = [list(prompt) for prompt in prompts]
    for row in expected:
        for _ in range(12):
            with torch.no_grad():
                row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
    found = generate(model, prompts, max_new_tokens=12)
    assert found == [row[-12:] for row in expected]


def test_weights_beyond_the_reach_are_0() -> None:
    model = steep_model(num_layers=1)
    (reach,) = [layer.window for layer in model.new_cache().layers]
    assert reach is not None
    bias = model.positional_tables(reach + 1).bias
    bound = _largest_score(model.layers[0].input_layernorm, model.layers[0].attention)
    assert bias is not None and bound is not None
    worst = torch.stack([bias[:, 0] - bound, bias[:, reach] + bound])  # own key, farthest key
    assert (worst.softmax(0)[1] == 0).all()
    near = torch.stack([bias[:, 0] - bound, bias[:, reach - 2] + bound])
    assert (near.softmax(0)[1] > 0).any()


def test_the_bound_of_the_scores_is_one_and_is_met() -> None:
    """With W_q = W_k the largest score is that of the input along the first singular vector."""
    model = steep_model(norm="rmsnorm", num_layers=1)
    (layer,) = model.layers
    weight = layer.attention.query_key_value.weight
    with torch.no_grad():
        layer.attention.query_key_value.bias.zero_()
        layer.input_layernorm.scale.uniform_(0.5, 2.0)
        of_heads = weight.view(4, 3, 8, 32)
        of_heads[:, 1] = of_heads[:, 0]
        bound = _largest_score(layer.input_layernorm, layer.attention)
        assert bound is not None
        scale = layer.input_layernorm.scale
        direction = torch.linalg.svd(of_heads[:, 0] * scale).Vh[:, 0]
        seen = layer.input_layernorm(torch.cat([direction, torch.randn(500, 32)]))
        q, k, _ = layer.attention._heads(layer.attention.query_key_value(seen[None]))
        scores = ((q * k).sum(-1)[0] / 8**0.5).amax(1)
    assert (scores <= bound).all()
    assert (scores >= 0.98 * bound).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"pos_emb": "kerple_log"},
        {"pos_emb": "rpe"},
        {"norm": "scalenorm"},
        {"scalable_softmax": True},
        {"qk_norm": "per_head"},
        {"pos_emb": "alibi_learned", "slope": 1e-4},
    ],
)
def test_without_a_proof_all_keys_stay(changes: dict[str, object]) -> None:
    model = steep_model(**changes)
    assert [layer.window for layer in model.new_cache().layers] == [None, None]


def test_it_is_found_once_for_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []

    def counting(*of: object) -> int | None:
        counted.append(of)
        return layer_reach(*of)

    layer_reach = transformer.layer_reach
    monkeypatch.setattr(transformer, "layer_reach", counting)
    model = steep_model(num_layers=1)

    def found() -> tuple[int | None, int]:
        """The reach, and how many computations it took."""
        counted.clear()
        return model.new_cache().layers[0].window, len(counted)

    reach, times = found()
    assert reach is not None and times == 1
    prompts = [torch.randint(64, (length,)).tolist() for length in (400, 200, 7)]
    read_prompts(model, prompts)  # three blocks, and the cache of all
    assert len(counted) == 1 and found() == (reach, 0)

    (kernel,) = model.positional_embeddings()
    with torch.no_grad():
        kernel.get_parameter("r1").div_(2)
    farther, times = found()
    assert farther is not None and farther > 1.5 * reach and times == 1

    model.train()
    assert found() == found() == (farther, 1)
    kernel.get_parameter("r1").data.mul_(2)  # DeepSpeed's way, which counts no version
    assert found() == (reach, 1)
    model.eval()
    assert (found(), found()) == ((reach, 1), (reach, 0))
    kernel.get_parameter("r1").data.div_(2)
    assert found() == (farther, 1)
    kernel.get_parameter("r1").data.mul_(2)
    assert model.bfloat16().new_cache().layers[0].window != reach


def test_float64_weights_keep_all_keys_as_their_softmax_has_more_digits() -> None:
    assert steep_model().double().new_cache().layers[0].window is None
