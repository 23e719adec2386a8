"""Configs and names of weights in Hugging Face's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXForCausalLM

from megatron.checkpoints import read_checkpoint
from megatron.checkpoints.hf.folder import write_hf
from megatron.errors import CheckpointError
from tests.checkpoints.small_models import at_rest, logits_of, random_model, small_args, tokens

WAVE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0, "wave": 3}


@pytest.mark.parametrize(
    "changes",
    [
        {"gpt_j_residual": True, "no_weight_tying": True, "rotary_pct": 0.25},
        {"bias_gelu_fusion": True, "rotary_emb_base": 5000},
        {"use_bias_in_attn_linear": False, "intermediate_size": 48, "layernorm_epsilon": 1e-3},
    ],
)
def test_rotary_models_are_plain_gpt_neox(tmp_path: Path, changes: dict[str, Any]) -> None:
    args = small_args(pos_emb="rotary", **changes)
    model = random_model(args)
    original = at_rest(model, args)
    write_hf(original, tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(exported) is GPTNeoXForCausalLM
    assert not list(tmp_path.glob("*.py"))
    expected = logits_of(model, tokens(100))
    torch.testing.assert_close(logits_of(exported, tokens(100)), expected, atol=1e-4, rtol=0)
    exported.save_pretrained(tmp_path / "again")
    again = read_checkpoint(tmp_path / "again")
    assert again.weights.keys() == original.weights.keys()
    assert all(torch.equal(again.weights[name], t) for name, t in original.weights.items())


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"model_type": "gpt_neox", "hidden_act": "quick_gelu"}, "quick_gelu"),
        ({"model_type": "gpt_neox", "rope_parameters": WAVE}, "wave = 3 is not converted"),
    ],
)
def test_other_folders_are_refused(tmp_path: Path, content: dict[str, Any], complaint: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=complaint):
        read_checkpoint(tmp_path)
