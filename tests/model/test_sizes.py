"""Counts of parameters and bytes agree with the model that is built and with what runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.model.sizes import MemoryEstimate, ModelSizes
from megatron.neox_arguments import NeoXArgs
from tests.neox_arguments.samples import TINY


@pytest.mark.parametrize(
    "values",
    [
        {"pos_emb": "learned"},
        {"pos_emb": "kerple_log", "no_weight_tying": True},
        {"pos_emb": "kerple_power", "kerple_share": "per_layer"},
        {"pos_emb": "rpe", "norm": "rmsnorm"},
        {"pos_emb": "alibi", "norm": "scalenorm", "gpt_j_residual": True},
        {"pos_emb": "rotary", "gpt_j_residual": True, "gpt_j_tied": True},
        {"pos_emb": "none", "activation": "swiglu", "use_bias_in_mlp": False},
        {"pos_emb": "none", "use_bias_in_norms": False, "use_bias_in_attn_linear": False},
        {"pos_emb": "kerple_log3", "intermediate_size": 48},
        {"pos_emb": "kerple_bias_wht"},
        {"pos_emb": "gauss_wht1"},
        {"pos_emb": "gauss_wht2"},
        {"pos_emb": "gauss_bias2"},
        {"pos_emb": "gauss_bias3"},
        {"pos_emb": "sandwich"},
        {"pos_emb": "none", "num_kv_heads": 2},
        {"pos_emb": "none", "use_qk_layernorm": True},
        {"pos_emb": "none", "use_qk_layernorm": True, "norm": "rmsnorm", "num_kv_heads": 2},
        {"pos_emb": "none", "norm": "non_parametric_layernorm", "gpt_j_tied": True},
        {"norm": "rmsnorm", "qk_norm": "all_heads", "norm_placement": "output", "kv_channels": 12},
        {"pos_emb": "none", "activation": "glu"},
        {"pos_emb": "rotary", "use_qk_layernorm": True, "use_bias_in_norms": False},
        {"pos_emb": "none", "forget_gate": True, "use_bias_in_attn_linear": False},
        {"pos_emb": "none", "attention_sinks": True},
        {"pos_emb": "rotary", "attention_sinks": True, "scalable_softmax": True},
        {"pos_emb": "sinusoidal"},
        {"pos_emb": "kerple_power_original"},
        {"pos_emb": "alibi_learned", "kerple_share": "per_layer"},
    ],
)
def test_count_is_the_models(values: dict[str, Any]) -> None:
    from megatron.model import GPTModel, ModelSpec

    args = NeoXArgs.from_dict({**TINY, "vocab_size": 100, **values})
    sizes = ModelSizes(args)
    model = GPTModel(ModelSpec.from_args(args, sizes.spec.padded_vocab_size))
    unique = {id(parameter): parameter.numel() for parameter in model.parameters()}
    assert sizes.parameters.total == sum(unique.values())


def test_llama_7b_has_the_parameters_that_its_authors_count() -> None:
    llama = {
        "num_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "activation": "swiglu",
        "intermediate_size": 32768,
        "mlp_multiple_of": 256,
        "norm": "rmsnorm",
        "pos_emb": "rotary",
        "no_weight_tying": True,
        "make_vocab_size_divisible_by": 1,
        "vocab_size": 32000,
        **{f"use_bias_in_{part}": False for part in ("norms", "attn_linear", "mlp")},
    }
    assert ModelSizes(NeoXArgs.from_dict({**TINY, **llama})).parameters.total == 6_738_415_616


def memory_under_zero(stage: int, precision: str) -> MemoryEstimate:
    zero = {"stage": stage}
    args = NeoXArgs.from_dict({**TINY, "precision": precision, "zero_optimization": zero})
    return ModelSizes(args).memory(4)


def test_zero_stages_save_what_they_split() -> None:
    totals = [memory_under_zero(stage, "fp32") for stage in range(4)]
    assert totals[1].optimizer == totals[0].optimizer // 4
    assert totals[1].gradients == totals[0].gradients
    assert totals[2].gradients == totals[0].gradients // 4
    assert totals[3].parameters == totals[0].parameters // 4
    assert totals[0].total > totals[1].total > totals[2].total > totals[3].total


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_without_zero_run_and_are_counted_under_stage_1(precision: str) -> None:
    assert memory_under_zero(0, precision) == memory_under_zero(1, precision)
    args = NeoXArgs.from_dict({**TINY, "precision": precision})
    assert args.deepspeed_config(4)["zero_optimization"]["stage"] == 1


@pytest.mark.parametrize(
    ("block", "fits"),
    [
        ({}, False),
        ({"cpu_offload": True}, True),
        ({"offload_optimizer": {"device": "cpu"}}, True),
        ({"offload_optimizer": {"device": "none"}}, False),
    ],
)
def test_an_optimizer_that_is_offloaded_takes_no_memory_of_the_device(
    block: dict[str, Any], fits: bool
) -> None:
    args = NeoXArgs.from_dict({**TINY, "zero_optimization": {"stage": 1, **block}})
    sizes = ModelSizes(args)
    needed = sizes.memory(1)
    without = needed.parameters + needed.gradients
    assert (sizes.shortage(1, without, "this GPU") is None) == fits


def test_a_vocabulary_of_ones_own_is_counted_and_an_absent_one_is_said(tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocab.json"
    args = NeoXArgs.from_dict({**TINY, "vocab_file": str(vocabulary)})
    assert ModelSizes(args).spec.padded_vocab_size == 50304
    assert "vocabulary of 50257 assumed" in ModelSizes(args).assumptions[0]
    vocabulary.write_text(json.dumps({str(number): number for number in range(4096)}))
    assert ModelSizes(args).spec.padded_vocab_size == 4096
    assert ModelSizes(args).assumptions == ()
