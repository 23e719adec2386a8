"""DeepSpeed's own config class must understand what we hand it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.neox_arguments import NeoXArgs
from tests.conftest import REPOSITORY
from tests.neox_arguments.samples import TINY


def parsed(config: dict[str, Any]) -> Any:
    from deepspeed.runtime.config import DeepSpeedConfig

    return DeepSpeedConfig(config)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_reads_what_we_mean(precision: str, stage: int) -> None:
    args = NeoXArgs.from_dict(
        {
            **TINY,
            "precision": precision,
            "zero_optimization": {"stage": stage, "cpu_offload": False, "reduce_bucket_size": 5e7},
            "gradient_accumulation_steps": 3,
            "gradient_clipping": 0.5,
            "fp32_allreduce": True,
            "partition_activations": True,
        }
    )
    config = parsed(args.deepspeed_config(1))
    assert config.train_batch_size == 6
    assert config.train_micro_batch_size_per_gpu == 2
    assert config.gradient_accumulation_steps == 3
    assert config.gradient_clipping == 0.5
    # fp16 and bf16 without ZeRO run as stage 1 (see zero_stage_in_effect).
    assert config.zero_optimization_stage == (stage if precision == "fp32" else max(stage, 1))
    assert config.zero_config.reduce_bucket_size == 50_000_000
    assert config.float16_config.enabled == (precision == "fp16")
    assert config.bfloat16_config.enabled == (precision == "bf16")
    assert config.activation_checkpointing_config.partition_activations
    assert config.pipeline["pipe_partitioned"] is False
    assert config.pipeline["grad_partitioned"] is False
    assert str(config.communication_data_type) == "torch.float32"
    assert config.optimizer_name is None


def test_loss_scaling_reaches_deepspeed() -> None:
    block = {"enabled": True, "initial_scale_power": 12, "hysteresis": 3, "min_loss_scale": 1}
    config = parsed(NeoXArgs.from_dict({**TINY, "fp16": block}).deepspeed_config(1))
    assert config.float16_config.initial_scale_power == 12
    assert config.float16_config.hysteresis == 3


def test_a_lowest_loss_scale_that_deepspeed_cannot_take_is_refused() -> None:
    whole = {**TINY, "fp16": {"enabled": True, "min_loss_scale": 2.0}}
    assert NeoXArgs.from_dict(whole).deepspeed_config(1)["fp16"]["min_loss_scale"] == 2
    with pytest.raises(ConfigError, match=r"fp16.min_loss_scale = 0.5 .* multiple of 1"):
        NeoXArgs.from_dict({**TINY, "fp16": {"enabled": True, "min_loss_scale": 0.5}})


def test_old_cpu_offload_becomes_offload_optimizer() -> None:
    zero = {"stage": 2, "cpu_offload": True}
    config = NeoXArgs.from_dict({**TINY, "zero_optimization": zero}).deepspeed_config(1)
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert "cpu_offload" not in config["zero_optimization"]


def test_extra_arguments_pass_but_do_not_replace() -> None:
    args = NeoXArgs.from_dict({**TINY, "deepspeed_extra_args": {"seed_layers": True}})
    assert args.deepspeed_config(1)["seed_layers"] is True
    with pytest.raises(ConfigError, match="train_batch_size"):
        NeoXArgs.from_dict(
            {**TINY, "deepspeed_extra_args": {"train_batch_size": 4}}
        ).deepspeed_config(1)


def test_any_key_that_deepspeed_knows_passes_in_zeros_block() -> None:
    zero = {"stage": 3, "stage3-module-granularity-threshold": 7, "zero_hpz_partition_size": 1}
    args = NeoXArgs.from_dict({**TINY, "zero_optimization": zero})
    config = parsed(args.deepspeed_config(1)).zero_config
    assert config.module_granularity_threshold == 7
    assert config.zero_hpz_partition_size == 1
    with pytest.raises(ConfigError, match=r"zero_optimization\.zero_hpz_partition_sise.*_size\?"):
        NeoXArgs.from_dict({**TINY, "zero_optimization": {"zero_hpz_partition_sise": 1}})


def test_deepspeed_is_imported_for_a_foreign_key_alone() -> None:
    """Else a dry run would take seconds."""
    program = (
        "import sys; from megatron.neox_arguments import NeoXArgs; "
        f"NeoXArgs.from_dict({{**{TINY!r}, 'zero_optimization': {{'stage': 1}}}}); "
        "sys.exit('deepspeed' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True)


def test_bf16_gradients_are_added_up_in_fp32_unless_told() -> None:
    half = {**TINY, "precision": "bf16"}
    assert parsed(NeoXArgs.from_dict(half).deepspeed_config(1)).grad_accum_dtype == "fp32"
    args = NeoXArgs.from_dict({**half, "data_types": {"grad_accum_dtype": "bf16"}})
    assert parsed(args.deepspeed_config(1)).grad_accum_dtype == "bf16"
