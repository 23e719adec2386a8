"""Old names, old ways to say bf16, and other codes' keys."""

from __future__ import annotations

import pytest

from megatron.errors import ConfigError
from megatron.neox_arguments import NeoXArgs
from tests.neox_arguments.samples import TINY, assert_refused


@pytest.mark.parametrize(
    ("values", "precision"),
    [
        ({}, "fp32"),
        ({"precision": "bfloat16"}, "bf16"),
        ({"precision": "fp16"}, "fp16"),
        ({"fp16": {"fp16": True, "enabled": True, "initial_scale_power": 12}}, "fp16"),
        ({"fp16": {"enabled": True, "type": "bfloat16"}}, "bf16"),
        ({"fp16": {"enabled": False, "type": "bfloat16"}}, "fp32"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"bf16": True}, "bf16"),
        ({"fp16": {"enabled": False}, "precision": "bf16"}, "bf16"),
    ],
)
def test_precision_is_derived(values: dict[str, object], precision: str) -> None:
    assert NeoXArgs.from_dict({**TINY, **values}).optimization.precision == precision


@pytest.mark.parametrize(
    "values",
    [
        {"precision": "fp32", "bf16": {"enabled": True}},
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        {"fp16": {"enabled": True, "type": "float8"}},
        {"fp16": {"enabled": True, "type": "bfloat16"}, "bf16": {"enabled": False}},
        {"precision": "int8"},
    ],
)
def test_precision_conflicts_are_errors(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"fp16|bf16|precision"):
        NeoXArgs.from_dict({**TINY, **values})


@pytest.mark.parametrize(
    ("values", "fragments"),
    [
        ({"moe_num_experts": 8}, ["moe_num_experts", "not implemented", "GPT-NeoX"]),
        ({"use_mup": True}, ["use_mup", "not implemented"]),
        ({"te_mha": True}, ["te_mha", "not implemented"]),
        ({"sparsity_config": {"block": 16}}, ["sparsity_config", "not implemented"]),
        ({"soft_prompt_tuning": {"enabled": True}}, ["soft_prompt_tuning", "not implemented"]),
        ({"lr": 0.1}, ["lr", "optimizer.params.lr"]),
        ({"pos_emb": None}, ["pos_emb", "none"]),
        ({"save-interval": 5, "checkpoint_factor": 6}, ["checkpoint_factor", "twice"]),
    ],
)
def test_keys_that_mean_something_else_here_are_refused(
    values: dict[str, object], fragments: list[str]
) -> None:
    assert_refused(values, fragments)


@pytest.mark.parametrize(
    "values",
    [
        {"use_mup": False, "mup_width_scale": 2},
        {"moe_num_experts": 1},
        {"sparsity_config": {}, "soft_prompt_tuning": {"enabled": False}},
        {"train_impl": "normal", "pack_impl": "packed", "deepspeed": True},
        {"split": [90, 5, 5]},
    ],
)
def test_foreign_keys_that_do_nothing_load(values: dict[str, object]) -> None:
    args = NeoXArgs.from_dict({**TINY, **values})
    assert args.model == NeoXArgs.from_dict(TINY).model
    assert NeoXArgs.from_dict(args.to_dict()) == args
