"""What users of GPT-NeoX and of the official KERPLE fork already have must load unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.neox_arguments import NeoXArgs
from tests.fixture_archives import unpacked
from tests.neox_arguments.samples import TINY, assert_refused, write

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
    args = NeoXArgs.from_files([unpacked(name) / "global_step7" / "configs" / "model.yml"])
    assert args.model.hidden_size == 48
    assert args.model.output_layer_parallelism == "row"


@pytest.mark.parametrize(
    ("values", "fragments"),
    [
        ({"num_layer": 3}, ["num_layer", "Did you mean num_layers"]),
        ({"seq-lenght": 3}, ["seq-lenght", "seq_length"]),
        ({"optimizer": {"typ": "Adam"}}, ["optimizer.typ", "Did you mean type"]),
        ({"optimizer": {"params": {"weight_decay": 1}}}, ["optimizer.params.weight_decay"]),
        ({"zero_optimization": {"stge": 1}}, ["zero_optimization.stge", "stage"]),
        ({"norm": "te_layernorm"}, ["norm", "layernorm"]),
        ({"optimizer": {"type": "onebitadam"}}, ["optimizer.type", "onebitadam"]),
        ({"num_kv_heads": 0}, ["num_kv_heads", "0", "greater than"]),
        ({"pos_emb": "kerpel_log"}, ["kerpel_log", "kerple_log"]),
    ],
)  # fmt: skip
def test_wrong_keys_and_values_say_what_and_how_to_fix(
    values: dict[str, object], fragments: list[str]
) -> None:
    assert_refused(values, fragments)


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


def test_gpt_neoxs_way_to_read_files_and_keys(tmp_path: Path) -> None:
    file = write(tmp_path, "a.yml", "{num-layers: 2, hidden-size: 32, num-attention-heads: 4}")
    more = {"train_batch_size": 4, "hidden_size": 64}
    args = NeoXArgs.from_ymls([str(file)], overwrite_values=more)
    assert (args.num_layers, args.hidden_size, args.train_batch_size) == (2, 64, 4)
    assert args.hidden_size == args.model.hidden_size
    with pytest.raises(AttributeError):
        args.no_such_key  # noqa: B018
    with pytest.raises(ConfigError, match="hidden_size is read only"):
        args.hidden_size = 3
    with pytest.raises(ConfigError, match=r"args.replace\(seed="):
        args.update_value("seed", 3)


def test_blocks_are_mappings_as_their_file_wrote_them(tmp_path: Path) -> None:
    block = {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.95]}}
    file = write(tmp_path, "a.yml", json.dumps({**TINY, "optimizer": block, "global_num_gpus": 1}))
    args = NeoXArgs.from_ymls([file])
    assert args.optimizer == block
    assert args.optimization.optimizer.type == "adam"
    assert args.global_num_gpus == 1
    changed = NeoXArgs.from_ymls([file], {"optimizer": {"type": "Adam", "params": {"lr": 0.002}}})
    assert changed.optimizer["params"]["lr"] == 0.002


def test_gpt_neoxs_way_from_one_command_line_to_the_next(tmp_path: Path) -> None:
    file = str(write(tmp_path, "a.yml", json.dumps(TINY)))
    args = NeoXArgs.consume_deepy_args(["train.py", file, "--wandb_group", "first"])
    other = NeoXArgs.from_ymls([file])
    before = other.config_hash()
    assert other != args
    other.wandb_group = "first"
    assert (other, other.config_hash()) == (args, before)
    with pytest.raises(ConfigError, match="wandb_group"):
        other.wandb_group = 3
    words = args.get_deepspeed_main_args()
    assert words[0] == "train.py"
    started = NeoXArgs.consume_neox_args(words)
    assert started.megatron_config == args.megatron_config
