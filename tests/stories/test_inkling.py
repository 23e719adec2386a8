"""Inkling's attention and whole models equal those of transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kerple import attention
from kerple.integrations.inkling import use_inkling_engine
from megatron.errors import EngineError

inkling = pytest.importorskip("transformers.models.inkling.modeling_inkling")

HEADS, KEY_HEADS, DIM, RANK = 4, 2, 16, 6


class Group(nn.Module):
    """What transformers' function asks of its layer."""

    num_key_value_groups = HEADS // KEY_HEADS
    training = False


def temperature(positions: Tensor, floor: int, alpha: float = 0.1) -> Tensor:
    return 1.0 + alpha * torch.log(((positions + 1).float() / floor).clamp(min=1.0))


@pytest.mark.parametrize("engine", ["naive", "tiled"])
@pytest.mark.parametrize(
    ("queries", "keys", "extent", "window", "floor"),
    [(150, 150, 40, None, 30), (64, 200, 100, None, 16), (120, 120, 50, 50, None)],
)
def test_outputs_and_gradients_are_those_of_transformers(
    engine: str, queries: int, keys: int, extent: int, window: int | None, floor: int | None
) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, HEADS, queries, DIM, requires_grad=True)
    k, v = (torch.randn(2, KEY_HEADS, keys, DIM, requires_grad=True) for _ in "kv")
    states = torch.randn(2, queries, HEADS, RANK, requires_grad=True)
    logits = inkling.InklingRelativeLogits(RANK, extent)
    nn.init.normal_(logits.proj)
    positions = torch.arange(keys - queries, keys)
    tau = torch.ones(queries) if floor is None else temperature(positions, floor)

    bias = logits(states, positions, torch.arange(keys)) * tau.view(1, 1, -1, 1)
    distance = positions[:, None] - torch.arange(keys)
    hidden = (distance < 0) | (distance >= (window or keys))
    mask = torch.zeros(queries, keys).masked_fill(hidden, -torch.inf)
    theirs, _ = inkling.eager_attention_forward(
        Group(), q * tau.view(1, 1, -1, 1), k, v, mask, scaling=1 / DIM, position_bias=bias
    )
    ours = attention(
        *(q, k, v),
        query_features=states.transpose(1, 2),
        distance_features=logits.proj[None],
        row_scale=None if floor is None else tau.view(1, 1, -1),
        window=window,
        scale=1 / DIM,
        engine=engine,
    ).transpose(1, 2)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    wanted = [q, k, v, states, logits.proj]
    grad = torch.randn_like(theirs)
    expected = torch.autograd.grad(theirs, wanted, grad)
    for actual, other in zip(torch.autograd.grad(ours, wanted, grad), expected, strict=True):
        torch.testing.assert_close(actual, other, rtol=1e-4, atol=2e-5)


inkling1 = pytest.importorskip("transformers.models.inkling")
inkling2 = pytest.importorskip("transformers.models.inkling2")

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 24,
    "d_rel": 6,
    "rel_extent": 40,
    "log_scaling_n_floor": 32,
    "layer_types": ["hybrid_sliding"] * 3 + ["hybrid"],
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
DENSE = {
    "intermediate_size": 96,
    "mlp_layer_types": ["dense"] * 4,
    "logits_mup_width_multiplier": 1.0,
}
EXPERTS = {
    "unpadded_vocab_size": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "n_layers_per_attn_res_block": 2,
    "eos_token_id": None,
}


@pytest.fixture(scope="module", params=["inkling", "inkling2"])
def models(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module]:
    """The same weights with transformers' attention and with ours."""
    torch.manual_seed(0)
    if request.param == "inkling":
        theirs = inkling1.InklingForCausalLM(inkling1.InklingTextConfig(**SIZES, **DENSE))
    else:
        theirs = inkling2.Inkling2ForCausalLM(inkling2.Inkling2TextConfig(**SIZES, **EXPERTS))
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    return theirs.eval(), use_inkling_engine(copy.deepcopy(theirs.eval()))


def tokens(length: int = 100) -> Tensor:
    return torch.randint(1, 64, (2, length), generator=torch.Generator().manual_seed(1))


def test_logits_and_gradients(models: tuple[nn.Module, nn.Module]) -> None:
    theirs, ours = models
    found = []
    for model in (theirs, ours):
        model.zero_grad()
        logits = model(tokens(), use_cache=False).logits
        logits.square().mean().backward()
        found.append((logits.detach(), {n: p.grad for n, p in model.named_parameters()}))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-4)
    for name, expected in found[0][1].items():
        if expected is not None:
            torch.testing.assert_close(found[1][1][name], expected, rtol=2e-3, atol=2e-4, msg=name)
    proj = [grad for name, grad in found[1][1].items() if name.endswith("rel_logits_proj.proj")]
    assert len(proj) == 4 and all(grad.abs().max() > 0 for grad in proj)


def test_padding_and_generation_with_a_cache(models: tuple[nn.Module, nn.Module]) -> None:
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[0, :9] = 0
    found = []
    for model in models:
        generated = model.generate(
            tokens(60), attention_mask=mask, max_new_tokens=20, do_sample=False
        )
        found.append(generated[:, 60:])
    assert torch.equal(found[0], found[1])


def test_every_layer_hands_over_its_factors(
    models: tuple[nn.Module, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def recorded(*operands: Tensor, **others: Any) -> Tensor:
        seen.append((others["query_features"].shape[-1], others["distance_features"].shape[-1]))
        return attention(*operands, **others)

    monkeypatch.setattr("kerple.integrations.inkling.attention", recorded)
    models[1](tokens(), use_cache=False)
    assert seen == [(6, 24)] * 3 + [(6, 40)]


def test_other_models_are_refused() -> None:
    with pytest.raises(EngineError, match="no relative logits of Inkling"):
        use_inkling_engine(nn.Linear(2, 2))
