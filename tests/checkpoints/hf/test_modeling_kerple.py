"""The Hugging Face model computes what ours computes, in every way transformers calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, StaticCache

from megatron.checkpoints.hf import (
    KerpleNeoXConfig,
    KerpleNeoXForCausalLM,
)
from megatron.neox_arguments.catalogue import METHODS
from tests.checkpoints.hf.exports import SCORE_TERMS, assert_same, both
from tests.checkpoints.small_models import logits_of, tokens

PATTERN: list[dict[str, Any]] = [
    {"count": 2, "pos_emb": "kerple_log", "sliding_window_width": 7},
    {"pos_emb": "none", "attention_temperature": {"floor": 4}},
    {"pos_emb": "rotary", "rotary_pct": 0.5, "attention_sinks": False},
    {"pos_emb": "rpe", "rpe_num_buckets": 8, "rpe_max_distance": 16, "forget_gate": True},
    {"pos_emb": "inkling", "inkling_features": 4, "sliding_window_width": 5},
]
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {"pos_emb": "kerple_log"},
    "parallel": {"pos_emb": "kerple_power", "gpt_j_residual": True, "no_weight_tying": True},
    "one_norm": {"pos_emb": "alibi", "gpt_j_residual": True, "gpt_j_tied": True},
    "rms_swiglu": {"pos_emb": "kerple_log3", "norm": "rmsnorm", "activation": "swiglu"},
    "scalenorm_tanh": {"pos_emb": "rpe", "norm": "scalenorm", "bias_gelu_fusion": True},
    "window": {"pos_emb": "kerple_log", "sliding_window_width": 7},
    "per_layer": {"pos_emb": "kerple_bias_wht", "kerple_share": "per_layer"},
    "softplus_pre": {
        "pos_emb": "kerple_power",
        "kerple_constraint": "softplus",
        "kerple_bias_scale": "pre",
    },
    "legacy": {"pos_emb": "kerple_log", "kerple_legacy_bf16": True},
    "no_biases": {
        "pos_emb": "none",
        "use_bias_in_norms": False,
        "use_bias_in_attn_linear": False,
        "use_bias_in_mlp": False,
    },
    "grouped": {"pos_emb": "kerple_log", "num_kv_heads": 2},
    "one_key_head": {"pos_emb": "kerple_bias_wht", "num_kv_heads": 1},
    "forget_gate": {"pos_emb": "none", "forget_gate": True},
    "inkling_pattern": {
        "inkling_distances": 9,
        "layer_pattern": [
            {"pos_emb": "inkling", "sliding_window_width": 5},
            {"pos_emb": "bam_ssmax", "forget_gate": True, "attention_temperature": {"floor": 8}},
        ],
    },
    "sinks": {"pos_emb": "rotary", "attention_sinks": True},
    "scalable_softmax": {"pos_emb": "alibi", "scalable_softmax": True, "sliding_window_width": 9},
    "score_terms": {"pos_emb": "kerple_bias_wht", "num_kv_heads": 2, **SCORE_TERMS},
    "pattern": {"num_layers": 6, "layer_pattern": PATTERN, **SCORE_TERMS},
    "pattern_per_layer": {
        "num_layers": 6,
        "layer_pattern": PATTERN,
        "kerple_share": "per_layer",
        "apply_query_key_layer_scaling": True,
    },
    "temperature": {"pos_emb": "kerple_bias_wht", "attention_temperature": {"floor": 6}},
    "qk_norm": {"pos_emb": "rotary", "use_qk_layernorm": True},
    "qk_rmsnorm_grouped": {
        "pos_emb": "rotary",
        "use_qk_layernorm": True,
        "norm": "rmsnorm",
        "num_kv_heads": 2,
    },
    "olmo2_shape": {
        "pos_emb": "kerple_log", "norm": "rmsnorm", "norm_placement": "output",
        "qk_norm": "all_heads", "num_kv_heads": 2, "kv_channels": 12,
    },
    "qwen_shape": {
        "pos_emb": "kerple_log", "norm": "rmsnorm", "qk_norm": "per_head",
        "use_bias_in_attn_linear": False, "add_qkv_bias": True, "activation": "swiglu",
    },
    "bilinear": {"pos_emb": "none", "norm": "non_parametric_layernorm", "activation": "bilinear"},
    "scaled_tables": {"pos_emb": "rpe", "num_layers": 4, "apply_query_key_layer_scaling": True},
    "scaled_tables_per_layer": {
        "pos_emb": "kerple_log",
        "kerple_share": "per_layer",
        "num_layers": 4,
        "apply_query_key_layer_scaling": True,
    },
    "linear": {"pos_emb": "rotary", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "ntk": {"pos_emb": "rotary", "rope_scaling": {"type": "ntk", "factor": 4.0}},
    "yarn": {
        "pos_emb": "rotary",
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position": 16},
        "attention_sinks": True,
    },
    "dynamic": {
        "pos_emb": "rotary",
        "rope_scaling": {"type": "dynamic", "factor": 4.0},
        "attention_sinks": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("pos_emb", METHODS)
def test_every_positional_embedding_beyond_the_training_length(
    tmp_path: Path, pos_emb: str, attention: str
) -> None:
    model, exported = both(tmp_path, pos_emb=pos_emb, no_weight_tying=True, attention=attention)
    length = 48 if pos_emb == "learned" else 150
    assert_same(logits_of(model, tokens(length)), logits_of(exported, tokens(length)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(tmp_path: Path, variant: str) -> None:
    model, exported = both(tmp_path, **VARIANTS[variant])
    assert_same(logits_of(model, tokens(60)), logits_of(exported, tokens(60)))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "pos_emb", ["kerple_log", "kerple_bias_wht", "sinusoidal", "score_terms", "pattern"]
)
def test_generation_with_and_without_cache(tmp_path: Path, pos_emb: str, attention: str) -> None:
    changes = VARIANTS.get(pos_emb, {"pos_emb": pos_emb})
    model, exported = both(tmp_path, **changes, attention=attention)
    prompt = tokens(12)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    options["attention_mask"] = torch.ones_like(prompt)  # else prompts that hold the pad id differ
    cached = exported.generate(prompt, **options)
    assert torch.equal(cached, exported.generate(prompt, use_cache=False, **options))
    static = exported.generate(prompt, cache_implementation="static", **options)
    assert torch.equal(cached, static)
    rows = prompt
    for _ in range(20):
        rows = torch.cat((rows, logits_of(model, rows)[:, -1:].argmax(-1)), 1)
    assert torch.equal(cached, rows)


def test_a_cache_of_fixed_size_gives_the_same_logits(tmp_path: Path) -> None:
    model, exported = both(tmp_path, pos_emb="kerple_log")
    cache = StaticCache(config=exported.config, max_cache_len=64)
    inputs = tokens(30)
    with torch.no_grad():
        parts = [
            exported(part, past_key_values=cache, use_cache=True).logits
            for part in inputs.split([20, 1, 9], 1)
        ]
    assert_same(logits_of(model, inputs), torch.cat(parts, 1))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "pos_emb", ["kerple_log", "rotary", "learned", "gauss_wht2", "score_terms"]
)
def test_left_padding_changes_nothing(tmp_path: Path, pos_emb: str, attention: str) -> None:
    changes = VARIANTS.get(pos_emb, {"pos_emb": pos_emb})
    model, exported = both(  # tied norms, so that rotary too is our class and not GPTNeoX
        tmp_path, **changes, gpt_j_residual=True, gpt_j_tied=True, attention=attention
    )
    inputs = tokens(20)
    padded = torch.cat((torch.full((2, 6), 3), inputs), 1)
    mask = torch.ones_like(padded)
    mask[0, :6] = 0
    with torch.no_grad():
        logits = exported(padded, attention_mask=mask).logits
    assert logits.isfinite().all()
    assert_same(logits_of(model, inputs)[0], logits[0, 6:])
    assert_same(logits_of(model, padded)[1], logits[1])
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    whole = torch.ones(1, 20, dtype=torch.long)
    alone = exported.generate(inputs[:1], attention_mask=whole, **options)[0, 20:]
    together = exported.generate(padded, attention_mask=mask, **options)[0, 26:]
    assert torch.equal(alone, together)


def test_right_padding_leaves_real_tokens_alone(tmp_path: Path) -> None:
    model, exported = both(tmp_path, pos_emb="kerple_log")
    inputs = tokens(20)
    mask = torch.ones_like(inputs)
    mask[0, 14:] = 0
    with torch.no_grad():
        logits = exported(inputs, attention_mask=mask).logits
    assert_same(logits_of(model, inputs)[0, :14], logits[0, :14])


def _gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("share", ["all", "per_layer"])
def test_gradient_checkpointing_gives_the_same_gradients(
    tmp_path: Path, share: str, reentrant: bool
) -> None:
    _, exported = both(tmp_path, pos_emb="kerple_log", kerple_share=share)
    exported.train()
    exported(tokens(), labels=tokens()).loss.backward()
    plain = _gradients(exported)
    exported.zero_grad()
    exported.gradient_checkpointing_enable({"use_reentrant": reentrant})
    exported.enable_input_require_grads()
    exported(tokens(), labels=tokens(), use_cache=False).loss.backward()
    again = _gradients(exported)
    assert plain.keys() == again.keys()
    assert any("positions.r1" in name for name in plain)
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gradients_equal_ours_kernel_included(tmp_path: Path, attention: str) -> None:
    model, exported = both(tmp_path, pos_emb="kerple_power", attention=attention)
    inputs = tokens(50)
    exported(inputs, labels=inputs).loss.backward()
    model.token_losses(inputs[:, :-1], inputs[:, 1:]).mean().backward()
    ours = model.sequential[1].embedding
    theirs = exported.gpt_neox.positions
    for name in ("r1", "r2"):
        expected = ours.get_parameter(name).grad
        assert expected is not None
        assert expected.abs().min() > 0
        torch.testing.assert_close(theirs.get_parameter(name).grad, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gradients_of_gates_sinks_and_scales_equal_ours(tmp_path: Path, attention: str) -> None:
    model, exported = both(tmp_path, **VARIANTS["score_terms"], attention=attention)
    inputs = tokens(50)
    exported(inputs, labels=inputs).loss.backward()
    model.token_losses(inputs[:, :-1], inputs[:, 1:]).mean().backward()
    ours, theirs = model.layers[0].attention, exported.gpt_neox.layers[0].attention
    for name in ("forget_gate.weight", "forget_gate.bias", "sinks", "softmax_scale"):
        expected = ours.get_parameter(name).grad
        assert expected is not None and expected.abs().min() > 0
        torch.testing.assert_close(theirs.get_parameter(name).grad, expected, rtol=1e-3, atol=1e-6)


def test_a_training_step_moves_the_kernel_and_survives_saving(tmp_path: Path) -> None:
    _, exported = both(tmp_path / "a", pos_emb="kerple_log")
    optimizer = torch.optim.Adam(exported.parameters(), lr=1e-2)
    before = exported.gpt_neox.positions.r1.detach().clone()
    exported.train()
    exported(tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    assert not torch.equal(exported.gpt_neox.positions.r1, before)
    exported.eval().save_pretrained(tmp_path / "b")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b").eval()
    assert torch.equal(logits_of(exported, tokens()), logits_of(again, tokens()))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bf16_keeps_the_kernel_in_fp32(tmp_path: Path, attention: str) -> None:
    model, exported = both(tmp_path, pos_emb="kerple_log")
    exported = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation=attention
    ).eval()
    assert exported.gpt_neox.embed_in.weight.dtype == torch.bfloat16
    assert exported.gpt_neox.positions.r1.dtype == torch.float32
    assert torch.equal(exported.gpt_neox.positions.r1, model.sequential[1].embedding.r1)
    reference = logits_of(model, tokens(100))
    error = (logits_of(exported, tokens(100)).float() - reference).abs().max()
    assert error < 0.05 * reference.abs().max()


def test_attentions_and_hidden_states_can_be_asked_for(tmp_path: Path) -> None:
    _, exported = both(tmp_path, pos_emb="kerple_log")
    with torch.no_grad():
        output = exported(tokens(10), output_attentions=True, output_hidden_states=True)
    assert [tuple(a.shape) for a in output.attentions] == [(2, 4, 10, 10)] * 2
    torch.testing.assert_close(output.attentions[0].sum(-1), torch.ones(2, 4, 10))
    assert len(output.hidden_states) == 3


def test_learned_positions_end_where_they_end(tmp_path: Path) -> None:
    _, exported = both(tmp_path, pos_emb="learned", attention_sinks=True)  # no GPT-2 has them
    with pytest.raises(ValueError, match="learned positions for 48 tokens"):
        exported(tokens(49))


def test_a_fresh_model_has_kernels_inside_their_bounds() -> None:
    config = KerpleNeoXConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=32, pos_emb="kerple_power",
    )  # fmt: skip
    torch.manual_seed(0)
    values = KerpleNeoXForCausalLM(config).gpt_neox.positions.kernel_values()
    assert values["r1"].min() > 0
    assert values["r2"].max() <= 2
    assert len(set(values["r1"].tolist())) == 4


def test_tables_that_no_file_had_start_from_their_values() -> None:
    """As `from_pretrained` fills what was left empty."""
    config = KerpleNeoXConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=32, pos_emb="kerple_power",
    )  # fmt: skip
    model = KerpleNeoXForCausalLM(config)
    positions = model.gpt_neox.positions
    for parameter in positions.parameters():
        parameter.data.fill_(-1.0)
    model._init_weights(positions)
    assert all((parameter > 0).all() for parameter in positions.parameters())
