"""A rehearsal of the first GPU step: the model on device "meta", where any tensor left on the CPU
raises as it would on a GPU. Nothing is computed there, so the numbers are other tests' business.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.model import GPTModel
from megatron.model.layer_formulas import ACTIVATIONS, GATED
from megatron.model.position_names import POSITIONAL_EMBEDDINGS
from tests.model.small_spec import SPEC

LENGTH = 40
META = torch.device("meta")


def step_on_meta(**changes: Any) -> GPTModel:
    """One training step: forward, loss, backward, AdamW; every gradient stays on the device."""
    model = GPTModel(SPEC.replace(**changes)).to(META).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.zeros(2, LENGTH + 1, dtype=torch.long, device=META)
    losses = model.token_losses(text[:, :-1], text[:, 1:])
    assert losses.device == META
    losses.mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.device == META, name
    optimizer.step()
    return model


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("pos_emb", sorted(POSITIONAL_EMBEDDINGS))
def test_every_position_trains_on_the_device(pos_emb: str, checkpointed: bool) -> None:
    step_on_meta(pos_emb=pos_emb, checkpoint_activations=checkpointed)


@pytest.mark.parametrize("kerple_constraint", ["ste", "project", "softplus"])
@pytest.mark.parametrize("kerple_share", ["all", "per_layer"])
@pytest.mark.parametrize("kerple_legacy_bf16", [False, True])
def test_every_kind_of_kernel_parameter_trains_on_the_device(
    kerple_legacy_bf16: bool, kerple_share: str, kerple_constraint: str
) -> None:
    step_on_meta(
        pos_emb="kerple_log",
        kerple_legacy_bf16=kerple_legacy_bf16,
        kerple_share=kerple_share,
        kerple_constraint=kerple_constraint,
    )


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "scalenorm"])
@pytest.mark.parametrize("no_weight_tying", [False, True])
def test_every_norm_and_head_trains_on_the_device(norm: str, no_weight_tying: bool) -> None:
    step_on_meta(pos_emb="kerple_power", norm=norm, no_weight_tying=no_weight_tying)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATED])
def test_every_activation_trains_on_the_device(activation: str) -> None:
    tanh = activation == "gelu_tanh"  # GPT-NeoX has a flag for it
    name = "gelu" if tanh else activation
    step_on_meta(pos_emb="none", activation=name, bias_gelu_fusion=tanh)


def test_dropout_and_a_window_train_on_the_device() -> None:
    # Not attention_dropout: its generator of random numbers exists on real devices only.
    step_on_meta(pos_emb="kerple_log", hidden_dropout=0.1, sliding_window_width=8)


def test_a_cache_decodes_on_the_device() -> None:
    model = step_on_meta(pos_emb="rotary").eval()
    cache = model.new_cache()
    text = torch.zeros(2, 5, dtype=torch.long, device=META)
    for tokens in (text, text[:, :1]):
        assert model.hidden_states(tokens, cache).device == META


def test_the_rehearsal_notices_a_tensor_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every test above could pass for the wrong reason."""
    left = torch.ones(SPEC.hidden_size)
    forward = GPTModel.hidden_states
    monkeypatch.setattr(GPTModel, "hidden_states", lambda *a, **k: forward(*a, **k) * left)
    with pytest.raises(RuntimeError, match="device"):
        step_on_meta(pos_emb="none")
