"""Names of weights in Hugging Face files."""

from __future__ import annotations

import pytest
import torch

from megatron.checkpoints.hf.architectures import GPT2, GPT_NEOX, LLAMA
from megatron.checkpoints.hf.weight_names import WeightNames
from megatron.errors import CheckpointError
from megatron.model import ModelSpec
from tests.checkpoints.small_models import small_args

SPEC = ModelSpec.from_args(small_args(pos_emb="rotary", no_weight_tying=True), 64)
TIED = SPEC.replace(no_weight_tying=False)


def test_buffers_and_a_tied_head_are_left_out_and_unknown_names_are_kept() -> None:
    names = ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq", "x.y"]
    assert WeightNames.of(TIED, LLAMA).to_ours(names) == {"7.x.y": ["x.y"]}
    assert WeightNames.of(SPEC, LLAMA).to_ours(names[:1]) == {
        "6.final_linear.weight": ["lm_head.weight"]
    }


def test_files_of_a_model_without_its_head_lack_a_prefix() -> None:
    names = ["wte.weight", "h.1.attn.bias", "h.1.ln_2.bias"]
    assert WeightNames.of(TIED, GPT2).to_ours(names) == {
        "0.word_embeddings.weight": ["wte.weight"],
        "3.post_attention_layernorm.bias": ["h.1.ln_2.bias"],
    }


def test_both_names_of_a_gpt_neox_head_are_known() -> None:
    for name in ("embed_out.weight", "lm_head.weight"):
        found = WeightNames.of(SPEC, GPT_NEOX).to_ours([name])
        assert found == {"6.final_linear.weight": [name]}


def test_a_missing_part_is_named() -> None:
    part = "model.layers.1.self_attn.{}_proj.weight"
    with pytest.raises(CheckpointError, match=r"layers.1.self_attn.k_proj.weight is missing"):
        WeightNames.of(SPEC, LLAMA).to_ours([part.format("q"), part.format("v")])


def test_shapes_that_do_not_fit_the_heads_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"\(30, 32\).* 4 heads of 8"):
        WeightNames.of(SPEC, LLAMA).whole(
            "2.attention.query_key_value.weight", [torch.zeros(30, 32)] * 3
        )
