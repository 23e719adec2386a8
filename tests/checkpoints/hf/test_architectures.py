"""Models of transformers, tiny and random: their logits are ours, there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

import kerple
from megatron.checkpoints import read_checkpoint
from megatron.checkpoints.hf.architectures import ARCHITECTURES
from megatron.checkpoints.hf.folder import write_hf
from megatron.errors import CheckpointError
from tests.checkpoints.small_models import at_rest, logits_of, random_model, small_args, tokens

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
DIVISORS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]}


def rope(kind: str, **keys: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **keys}}


LLAMA3 = rope(
    "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
CASES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),
    "llama_biases_tied_wide_heads": LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=12,
        hidden_act="gelu", rms_norm_eps=1e-3,
    ),
    "linear": LlamaConfig(**GROUPED, **rope("linear", factor=2.0)),
    "dynamic": LlamaConfig(**GROUPED, **rope("dynamic", factor=2.0)),
    "yarn": LlamaConfig(
        **GROUPED,
        **rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0),
    ),
    "longrope": LlamaConfig(
        **GROUPED, **rope("longrope", original_max_position_embeddings=32, **DIVISORS)
    ),
    "llama3": LlamaConfig(**GROUPED, **LLAMA3),
    "proportional": LlamaConfig(**GROUPED, **rope("proportional", partial_rotary_factor=0.5)),
    "mistral": MistralConfig(**GROUPED, sliding_window=9, head_dim=16),
    "qwen2": Qwen2Config(**GROUPED, tie_word_embeddings=True),
    "qwen2_window": Qwen2Config(
        **SIZES, num_key_value_heads=4, use_sliding_window=True, sliding_window=9,
        max_window_layers=0,
    ),
    "qwen2_windows_after_2": Qwen2Config(
        **{**GROUPED, "num_hidden_layers": 4}, use_sliding_window=True, sliding_window=9,
        max_window_layers=2,
    ),
    "qwen3_windows_between": Qwen3Config(
        **{**GROUPED, "num_hidden_layers": 6}, use_sliding_window=True, sliding_window=7,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2, head_dim=8,
    ),
    "qwen3": Qwen3Config(**GROUPED, head_dim=12),
    "qwen3_biases": Qwen3Config(**SIZES, num_key_value_heads=4, head_dim=8, attention_bias=True),
    "olmo2": Olmo2Config(**GROUPED, eos_token_id=1),
    "pythia": GPTNeoXConfig(**SIZES, **rope("default", partial_rotary_factor=0.25)),
    "neox_yarn": GPTNeoXConfig(
        **SIZES, use_parallel_residual=False, attention_bias=False, hidden_act="gelu_new",
        **rope(
            "yarn", factor=4.0, original_max_position_embeddings=16, partial_rotary_factor=0.5
        ),
    ),
    "gpt2": GPT2Config(
        vocab_size=64, n_positions=128, n_embd=32, n_layer=2, n_head=4, bos_token_id=0,
        eos_token_id=0, n_inner=40,
    ),
    "gpt2_untied": GPT2Config(
        vocab_size=64, n_positions=128, n_embd=32, n_layer=2, n_head=4, bos_token_id=0,
        eos_token_id=0, tie_word_embeddings=False, activation_function="relu",
    ),
}  # fmt: skip
QWEN3_SHAPE: dict[str, Any] = {
    "norm": "rmsnorm", "activation": "swiglu", "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False, "qk_norm": "per_head",
}  # fmt: skip
LENGTH = 100  # beyond max_position_embeddings, where scalings by length begin


def saved(folder: Path, config: PretrainedConfig, **options: Any) -> Any:
    """A model of transformers in which every parameter matters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder, **options)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers_there_and_back(tmp_path: Path, case: str) -> None:
    theirs = saved(tmp_path / "theirs", CASES[case], max_shard_size="10KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    expected = logits_of(theirs, tokens(LENGTH))
    ours = kerple.load_pretrained(tmp_path / "theirs")
    torch.testing.assert_close(logits_of(ours, tokens(LENGTH)), expected, atol=1e-4, rtol=0)
    (tmp_path / "back").mkdir()
    checkpoint = read_checkpoint(tmp_path / "theirs")
    write_hf(checkpoint, tmp_path / "back", architecture=CASES[case].model_type)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert type(back) is type(theirs)
    weights = back.state_dict()
    assert all(torch.equal(weights[name], other) for name, other in theirs.state_dict().items())
    torch.testing.assert_close(logits_of(back, tokens(LENGTH)), expected, atol=1e-5, rtol=0)


def test_bf16_stays_bf16_and_a_cast_is_written_as_such(tmp_path: Path) -> None:
    theirs = saved(tmp_path / "theirs", CASES["llama"]).bfloat16()
    theirs.save_pretrained(tmp_path / "half")
    for source, dtype in (("half", None), ("theirs", torch.bfloat16)):
        (tmp_path / f"from_{source}").mkdir()
        write_hf(read_checkpoint(tmp_path / source), tmp_path / f"from_{source}", dtype=dtype)
        back = AutoModelForCausalLM.from_pretrained(tmp_path / f"from_{source}")
        assert back.dtype == torch.bfloat16
        weights = back.state_dict()
        assert all(torch.equal(weights[name], other) for name, other in theirs.state_dict().items())


def test_every_architecture_has_a_case() -> None:
    assert {config.model_type for config in CASES.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pos_emb": "rotary"}, "gpt_neox"),
        ({"pos_emb": "learned"}, "gpt2"),
        ({"norm": "rmsnorm", "activation": "swiglu", "use_bias_in_attn_linear": False}, "llama"),
        ({"norm": "rmsnorm", "activation": "swiglu", "sliding_window_width": 5}, None),
        ({"use_bias_in_norms": False}, None),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, None),
        ({"activation": "softsign"}, None),
        ({"pos_emb": "kerple_log"}, None),
        ({"pos_emb": "rotary", "attention_sinks": True}, None),
        ({**QWEN3_SHAPE, "layer_pattern": [{}, {"sliding_window_width": 5}]}, "qwen3"),
        (
            {**QWEN3_SHAPE, "sliding_window_width": 5, "layer_pattern": [{"pos_emb": "none"}, {}]},
            None,
        ),
        (
            {
                **QWEN3_SHAPE,
                "layer_pattern": [{"sliding_window_width": 5}, {"sliding_window_width": 6}],
            },
            None,
        ),
    ],
)
def test_a_standard_class_only_where_it_computes_the_same(
    tmp_path: Path, changes: dict[str, Any], expected: str | None
) -> None:
    args = small_args(**{"pos_emb": "rotary", **changes})
    write_hf(at_rest(random_model(args), args), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == (
        expected or "kerple_neox"
    )
    assert bool(list(tmp_path.glob("*.py"))) == (expected is None)


def test_an_architecture_that_does_not_fit_says_why(tmp_path: Path) -> None:
    args = small_args(pos_emb="rotary")
    with pytest.raises(CheckpointError, match=r"LlamaForCausalLM does not .* activation = gelu"):
        write_hf(at_rest(random_model(args), args), tmp_path, architecture="llama")


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"model_type": "llama", "hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu'.* silu"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "only False"),
        (
            {"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["chunked_attention"]},
            "layer_types: 'chunked_attention' is not converted; there are full_attention",
        ),
        ({"model_type": "llama", **rope("axial", factor=2.0)}, "rope_type 'axial'.* longrope"),
    ],
)
def test_what_is_not_converted_is_named(
    tmp_path: Path, config: dict[str, Any], complaint: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=complaint):
        read_checkpoint(tmp_path)
