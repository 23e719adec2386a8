"""What users of GPT-NeoX and of the official KERPLE fork already have must load unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.neox_arguments import NeoXArgs
from tests.conftest import FIXTURES
from tests.neox_arguments.samples import TINY

OFFICIAL_STYLE = """
# comments, flow mappings, trailing commas, Python's True
{
   "pipe-parallel-size": 1,
   "num-layers": 12, "hidden-size": 768, "num-attention-heads": 12,
   "seq-length": 512, "seq-length-val": 2048, "max-position-embeddings": 512,
   "pos-emb": "kerple_power_ap_",
   "scaled-upper-triang-masked-softmax-fusion": false,
   "optimizer": { "type": "Adam",
                  "params": { "lr": 0.0006, "betas": [0.9, 0.999], "eps": 1.0e-8, } },
   "zero_optimization": { "stage": 0, "overlap_comm": True, "cpu_offload": False },
   "train_micro_batch_size_per_gpu": 1, "gas": 3,
   "fp16": { "enabled": True, "type": "bfloat16", # set bf16
             "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1 },
   "train-iters": 0,
   "save-interval": 10000,
   "use_mup": false,
   "attention_config": [[["global"], 12]],
}
"""


def write(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.write_text(text)
    return path


def test_official_kerple_file_loads_with_its_meaning(tmp_path: Path) -> None:
    args = NeoXArgs.from_files([write(tmp_path, "ex_eval.yml", OFFICIAL_STYLE)])
    assert args.optimization.precision == "bf16"
    assert args.optimization.fp16 is None
    assert args.optimization.bf16 is not None and args.optimization.bf16.enabled
    assert args.optimization.train_iters == 0
    assert args.optimization.lr == 0.0006
    assert args.optimization.optimizer.params.betas == (0.9, 0.999)
    assert args.checkpoint.checkpoint_factor == 10000
    assert args.model.seq_length_val == 2048
    assert args.model.pos_emb == "kerple_power_ap_"
    assert args.batch_plan(1).train_batch_size == 3
    assert args.sources == {"ex_eval.yml": OFFICIAL_STYLE}


@pytest.mark.parametrize("name", ["official_kerple_log", "official_kerple_power_mp2"])
def test_configs_inside_official_checkpoints_load(name: str) -> None:
    args = NeoXArgs.from_files([FIXTURES / name / "global_step7" / "configs" / "model.yml"])
    assert args.model.hidden_size == 48
    assert args.model.output_layer_parallelism == "row"


@pytest.mark.parametrize(
    "name",
    ["kerple_log", "kerple_power_ap_", "kerple_power__ap", "kerple_power_ap_ap",
     "kerple_power_original"],
)  # fmt: skip
def test_official_position_names_are_known_here_and_to_the_model(name: str) -> None:
    from megatron.model.position_names import canonical_name
    from megatron.neox_arguments.catalogue import canonical_method

    NeoXArgs.from_dict({**TINY, "pos_emb": name})
    assert canonical_name(name) == canonical_method(name)


def test_every_registered_position_is_accepted() -> None:
    from megatron.model.position_base import POSITIONAL_EMBEDDINGS

    for name in POSITIONAL_EMBEDDINGS:
        assert NeoXArgs.from_dict({**TINY, "pos_emb": name}).model.pos_emb == name


def test_own_kernel_by_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        tmp_path,
        "my_positions.py",
        "from megatron.model.positional_embeddings import TableEmbedding\n"
        "class Mine(TableEmbedding):\n    pass\n",
    )
    write(tmp_path, "my_broken_positions.py", "1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = write(tmp_path, "mine.yml", json.dumps(TINY))
    assert NeoXArgs.from_files([config], sets=["pos_emb=my_positions:Mine"]).model.pos_emb
    for wrong in ("my_positions:Other", "no_such_module:X", "my_broken_positions:X", ":", "a:b:c"):
        with pytest.raises(ConfigError, match="pos_emb"):
            NeoXArgs.from_files([config], sets=[f"pos_emb={wrong!r}"])


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
        ({"num_layer": 3}, ["num_layer", "Did you mean num_layers"]),
        ({"seq-lenght": 3}, ["seq-lenght", "seq_length"]),
        ({"optimizer": {"typ": "Adam"}}, ["optimizer.typ", "Did you mean type"]),
        ({"optimizer": {"params": {"weight_decay": 1}}}, ["optimizer.params.weight_decay"]),
        ({"zero_optimization": {"stge": 1}}, ["zero_optimization.stge", "stage"]),
        ({"num_layers": "12"}, ["num_layers", "'12'", "integer"]),
        ({"num_layers": True}, ["num_layers", "True", "integer"]),
        ({"num_layers": 2.5}, ["num_layers", "2.5"]),
        ({"no_weight_tying": "yes please"}, ["no_weight_tying", "boolean"]),
        ({"hidden_dropout": 1.5}, ["hidden_dropout", "1.5", "less than or equal to 1"]),
        ({"optimizer": {"params": {"lr": float("nan")}}}, ["optimizer.params.lr", "finite"]),
        ({"wandb_run_name": 5}, ["wandb_run_name", "string"]),
        ({"norm": "te_layernorm"}, ["norm", "layernorm"]),
        ({"optimizer": {"type": "onebitadam"}}, ["optimizer.type", "onebitadam"]),
        ({"moe_num_experts": 8}, ["moe_num_experts", "not implemented", "GPT-NeoX"]),
        ({"use_mup": True}, ["use_mup", "not implemented"]),
        ({"te_mha": True}, ["te_mha", "not implemented"]),
        ({"num_kv_heads": 3}, ["num_kv_heads = 3", "num_attention_heads = 4", "Use"]),
        ({"num_kv_heads": 0}, ["num_kv_heads", "0", "greater than"]),
        ({"num_kv_heads": 1, "model_parallel_size": 2}, ["model_parallel_size = 2", "kv_heads"]),
        ({"use_qk_layernorm": True, "norm": "rmsnorm"}, ["use_qk_layernorm", "rmsnorm"]),
        ({"use_qk_layernorm": True, "model_parallel_size": 2}, ["use_qk_layernorm", "= 2"]),
        ({"use_qk_layernorm": True, "num_kv_heads": 2}, ["use_qk_layernorm", "num_kv_heads"]),
        ({"sparsity_config": {"block": 16}}, ["sparsity_config", "not implemented"]),
        ({"soft_prompt_tuning": {"enabled": True}}, ["soft_prompt_tuning", "not implemented"]),
        ({"lr": 0.1}, ["lr", "optimizer.params.lr"]),
        ({"attention_config": [[["local"], 2]]}, ["local", "not implemented"]),
        ({"attention_config": [[["global"], 5]]}, ["5 layers", "num_layers = 2"]),
        ({"attention_config": ["global"]}, ["attention_config", "expected"]),
        ({"pos_emb": None}, ["pos_emb", "none"]),
        ({"pos_emb": "kerpel_log"}, ["kerpel_log", "kerple_log"]),
        ({"save-interval": 5, "checkpoint_factor": 6}, ["checkpoint_factor", "twice"]),
        ({"allow_changed": ["train_bach_size"]}, ["allow_changed", "train_batch_size?"]),
    ],
)  # fmt: skip
def test_wrong_keys_and_values_say_what_and_how_to_fix(
    values: dict[str, object], fragments: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        NeoXArgs.from_dict({**TINY, **values})
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"use_mup": False, "mup_width_scale": 2},
        {"moe_num_experts": 1},
        {"sparsity_config": {}, "soft_prompt_tuning": {"enabled": False}},
        {"num_kv_heads": 4},
        {"num_kv_heads": 2, "model_parallel_size": 2},
        {"use_qk_layernorm": True},
        {"train_impl": "normal", "pack_impl": "packed", "deepspeed": True},
        {"attention_config": [[["flash"], 2]]},
        {"attention_config": [[["global"], "all"]]},
        {"train_iters": 5e4},
        {"eval_lengths": "16, 32", "pos_emb": "alibi"},
        {"split": [90, 5, 5]},
        {"do_train": 1},
        {"allow_changed": ["optimizer.params", "seed"]},
    ],
)
def test_foreign_keys_that_do_nothing_and_loose_spellings_load(values: dict[str, object]) -> None:
    args = NeoXArgs.from_dict({**TINY, **values})
    assert NeoXArgs.from_dict(args.to_dict()) == args


def test_missing_sizes_are_named_together() -> None:
    with pytest.raises(ConfigError) as caught:
        NeoXArgs.from_dict({})
    for key in ("num_layers", "hidden_size", "num_attention_heads"):
        assert f"{key} is missing" in str(caught.value)


def test_round_trip_through_dict_yaml_and_base64(tmp_path: Path) -> None:
    from megatron.neox_arguments import decode_config, encode_config

    args = NeoXArgs.from_dict(
        {
            **TINY,
            "optimizer": {"params": {"lr": 1e-5}},
            "prompt_end": "\n",
            "wandb_group": "ä: b",
            "pos_emb": "rotary",
            "rope_scaling": {"type": "yarn", "factor": 4},
        }
    )
    again = NeoXArgs.from_files([write(tmp_path, "again.yml", args.to_yaml())])
    assert NeoXArgs.from_dict(args.to_dict()) == args == again
    assert decode_config(encode_config(again)) == args
    assert decode_config(encode_config(again)).sources == again.sources
    assert again.config_hash() == args.config_hash()


def test_hash_sees_the_model_but_not_the_launcher() -> None:
    args = NeoXArgs.from_dict(TINY)
    assert args.replace(num_gpus=2, log_interval=7).config_hash() == args.config_hash()
    assert args.replace(seed=1).config_hash() != args.config_hash()


def test_scientific_notation_without_a_dot_is_a_number(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yml", "optimizer: {params: {lr: 6e-4}}\nmin_lr: 1e-5\n")
    base = write(
        tmp_path, "b.yml", "num_layers: 1\nhidden_size: 8\nnum_attention_heads: 1\nseed: 1e3"
    )
    args = NeoXArgs.from_files([path, base])
    assert (args.optimization.lr, args.optimization.min_lr, args.runtime.seed) == (6e-4, 1e-5, 1000)


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (b"\xff\xfe\x00bad", "UTF-8"),
        (b"- a\n- b\n", "mapping"),
        (b"just text", "mapping"),
        (b"1: 2\n", "text key"),
        (b"a: [", "YAML"),
        (b"a: &x [*x]\n", "aliases"),
        (b"seed: 1\nseed: 2\n", "twice"),
        (b"seed: !!python/object/apply:os.system ['true']\n", "YAML"),
        (b"seed: !!binary aGk=\n", "bytes"),
        (b"deepspeed_extra_args: " + b"[" * 3000 + b"]" * 3000, "nested"),
        (b'wandb_group: "\\ud800"\n', "Unicode"),
        (b"seed: " + b"9" * 6000, "YAML"),
    ],
)
def test_files_that_are_not_configs(tmp_path: Path, content: bytes, fragment: str) -> None:
    path = tmp_path / "odd.yml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=fragment) as caught:
        NeoXArgs.from_files([path])
    assert "odd.yml" in str(caught.value)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    write(tmp_path, "small.yml", "{}")
    with pytest.raises(ConfigError, match=r"Did you mean .*small\.yml"):
        NeoXArgs.from_files([tmp_path / "smal.yml"])
    with pytest.raises(ConfigError, match="directory"):
        NeoXArgs.from_files([tmp_path])


@pytest.mark.parametrize(
    ("keys", "engine"),
    [
        ({}, "auto"),
        ({"scaled_upper_triang_masked_softmax_fusion": True}, "naive"),
        ({"scaled-upper-triang-masked-softmax-fusion": True}, "naive"),
        (
            {
                "scaled_upper_triang_masked_softmax_fusion": True,
                "attention_config": [[["flash"], 2]],
            },
            "auto",
        ),
        (
            {"scaled_upper_triang_masked_softmax_fusion": True, "attention_engine": "tiled"},
            "tiled",
        ),
        ({"scaled_masked_softmax_fusion": True}, "auto"),
    ],
)
def test_neox_key_for_the_fused_softmax_chooses_it(keys: dict[str, Any], engine: str) -> None:
    args = NeoXArgs.from_dict({**TINY, "num_layers": 2, **keys})
    assert args.model.engine_in_effect == engine
