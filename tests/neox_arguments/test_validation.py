"""Impossible combinations: the message has the keys, the values and a way out; others load."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.neox_arguments import NeoXArgs
from tests.neox_arguments.samples import TINY


@pytest.mark.parametrize(
    ("values", "fragments"),
    [
        ({"hidden_size": 30}, ["hidden_size = 30", "num_attention_heads = 4", "32"]),
        ({"model_parallel_size": 3}, ["model_parallel_size = 3", "= 4", "2"]),
        ({"model_parallel_size": 4, "intermediate_size": 65}, ["65", "intermediate_size 68"]),
        ({"pos_emb": "learned", "seq_length": 64, "max_position_embeddings": 32},
         ["seq_length = 64", "32", "learned"]),
        ({"pos_emb": "learned", "seq_length_val": 64}, ["seq_length_val = 64", "kerple_log"]),
        ({"pos_emb": "rotary", "rotary_pct": 0.1}, ["rotary_pct = 0.1"]),
        ({"pos_emb": "alibi", "rope_scaling": {"type": "ntk", "factor": 2}}, ["rope_scaling"]),
        ({"pos_emb": "rotary", "rotary_fade_iters": 9}, ["rotary_fade_iters with pos_emb"]),
        ({"pos_emb": "sinusoidal", "rotary_angles": 0.5}, ["rotary_angles with pos_emb = sin"]),
        ({"pos_emb": "none", "rotary_fade_iters": 9, "rotary_angles": 0.5}, ["fall from 1"]),
        ({"kerple_init": "fit"}, ["kerple_init = fit", "Add load_positions: fresh"]),
        ({"pos_emb": "rpe", "randomized_positions": 99}, ["99 with pos_emb = rpe", "rotary"]),
        ({"pos_emb": "fire", "randomized_positions": 99}, ["pos_emb = fire", "remove the key"]),
        ({"pos_emb": "none", "randomized_positions": 99}, ["pos_emb = none"]),
        ({"pos_emb": "rotary", "randomized_positions": 3}, ["is below seq_length", "Raise it"]),
        ({"pos_emb": "rotary", "randomized_positions": 10**9}, ["above 16,777,216", "Lower it"]),
        ({"pos_emb": "learned", "randomized_positions": 999}, ["max_position_embeddings", "999"]),
        ({"pos_emb": "rotary", "randomized_positions": 99, "reset_position_ids": True},
         ["reset_position_ids", "Remove one"]),
        ({"zero_optimization": {"stage": 2}, "pipe_parallel_size": 1},
         ["stage = 2", "pipe_parallel_size = 1", "pipe_parallel_size: 0"]),
        ({"zero_optimization": {"stage": 3}, "pipe_parallel_size": 2}, ["stage = 3"]),
        ({"pipe_parallel_size": 3}, ["pipe_parallel_size = 3", "num_layers = 2"]),
        ({"min_lr": 1.0}, ["min_lr = 1.0", "optimizer.params.lr"]),
        ({"split": "a,b"}, ["split", "949,50,1"]),
        ({"split": "0,0,0"}, ["split", "not all 0"]),
        ({"split": "1,2,3,4"}, ["split"]),
        *(({"split": text}, ["split"]) for text in ("-1,2", "", "nan,1,1", "inf,1,1", "1,,1")),
        ({"eval_lengths": []}, ["eval_lengths", "empty"]),
        ({"train_data_paths": ["a", "b"], "train_data_weights": [1.0]},
         ["train_data_weights", "1 numbers", "2"]),
        ({"data_path": "a", "train_data_paths": ["b"]}, ["data_path", "train_data_paths"]),
        ({"data_path": "a", "label_data_paths": ["b"]},
         ["train_label_data_paths has 1", "data_path takes no labels"]),
        ({"train_data_paths": ["a"], "train_label_data_paths": ["b"], "valid_data_paths": ["c"]},
         ["valid_label_data_paths has 0 prefixes for 1 valid_data_paths"]),
        ({"train_epochs": 1, "pack_impl": "unpacked"}, ["pack_impl = unpacked", "train_iters"]),
        ({"profile": True, "profile_step_start": 5, "profile_step_stop": 5},
         ["profile_step_stop = 5 is not after"]),
        ({"override_lr_scheduler": True, "use_checkpoint_lr_scheduler": True}, ["Keep one"]),
        ({"include": "a", "exclude": "b"}, ["include", "exclude"]),
        ({"include": "a", "num_gpus": 2}, ["num_gpus"]),
        ({"num_kv_heads": 3}, ["num_kv_heads = 3", "num_attention_heads = 4", "Use"]),
        ({"num_kv_heads": 1, "model_parallel_size": 2}, ["model_parallel_size = 2", "kv_heads"]),
        ({"use_qk_layernorm": True, "model_parallel_size": 2}, ["use_qk_layernorm", "= 2"]),
        ({"qk_norm": "all_heads", "norm": "rmsnorm", "model_parallel_size": 2}, ["qk_norm", "= 2"]),
        ({"qk_norm": "per_head"}, ["qk_norm = per_head", "norm = layernorm"]),
        ({"norm_placement": "output", "gpt_j_residual": True}, ["norm_placement", "Remove one"]),
        ({"attention_config": [[["local"], 2]]}, ["local", "not implemented"]),
        ({"attention_config": [[["global"], 5]]}, ["5 layers", "num_layers = 2"]),
        ({"attention_config": ["global"]}, ["attention_config", "expected"]),
        ({"allow_changed": ["train_bach_size"]}, ["allow_changed", "train_batch_size?"]),
    ],
)  # fmt: skip
def test_impossible_combinations(values: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        NeoXArgs.from_dict({**TINY, **values})
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("pos_emb", ["kerple_log", "alibi", "rpe", "rotary", "sinusoidal", "none"])
def test_every_other_position_may_be_evaluated_at_any_length(pos_emb: str) -> None:
    values = {"pos_emb": pos_emb, "seq_length_val": 16384, "eval_lengths": [32768]}
    args = NeoXArgs.from_dict({**TINY, **values, "max_position_embeddings": 8})
    assert args.model.validation_length == 16384


@pytest.mark.parametrize(
    "values",
    [
        {"num_kv_heads": 4},
        {"num_kv_heads": 2, "model_parallel_size": 2},
        {"use_qk_layernorm": True},
        {"use_qk_layernorm": True, "norm": "rmsnorm", "num_kv_heads": 2},
        {"gpt_j_tied": True},
        {"attention_config": [[["flash"], 2]]},
        {"attention_config": [[["global"], "all"]]},
        {"allow_changed": ["optimizer.params", "seed"]},
    ],
)
def test_possible_combinations_load(values: dict[str, object]) -> None:
    args = NeoXArgs.from_dict({**TINY, **values})
    assert NeoXArgs.from_dict(args.to_dict()) == args
