"""transformers' own Inkling models, with its dense attention and with our engine."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kerple.integrations.inkling import BiasFactors, use_inkling_engine
from megatron.errors import EngineError

inkling = pytest.importorskip("transformers.models.inkling")
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
    "intermediate_size": 96,
    "layer_types": ["hybrid_sliding"] * 3 + ["hybrid"],
    "mlp_layer_types": ["dense"] * 4,
    "logits_mup_width_multiplier": 1.0,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}


@pytest.fixture(scope="module")
def models() -> tuple[nn.Module, nn.Module]:
    """The same weights with transformers' attention and with ours."""
    torch.manual_seed(0)
    theirs = inkling.InklingForCausalLM(inkling.InklingTextConfig(**SIZES)).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    return theirs, use_inkling_engine(copy.deepcopy(theirs))


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


def test_the_bias_is_never_made_dense(
    models: tuple[nn.Module, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(BiasFactors, "to", lambda self, *_: seen.append(self) or self)
    models[1](tokens(), use_cache=False)
    assert [tuple(x.distance_features.shape) for x in seen] == [(1, 6, 40)]  # the global layer


def test_other_models_are_refused() -> None:
    with pytest.raises(EngineError, match="no relative logits of Inkling"):
        use_inkling_engine(nn.Linear(2, 2))
