"""What the declaration of a key states, and which keys hold mappings."""

from __future__ import annotations

import pytest

from megatron.neox_arguments import FACTS, changes_training, of_the_checkpoint, same_on_resume
from megatron.neox_arguments.declared_keys import FREE_BLOCKS, NESTED_BLOCKS


@pytest.mark.parametrize(
    ("key", "changes", "trains", "resumed", "owned"),
    [
        ("norm", "model", True, True, True),
        ("rope_scaling", "model", True, True, False),
        ("hidden_dropout", "training", True, True, False),
        ("init_method_std", "training", True, False, False),
        ("train_iters", "training", True, False, False),
        ("seed", "training", True, True, False),
        ("attention_engine", "execution", False, False, False),
        ("zero_optimization", "execution", False, False, False),
        ("valid_data_paths", "evaluation", False, True, False),
        ("recall_samples", "evaluation", False, False, False),
        ("positionwise_bucket_count", "evaluation", False, False, False),
        ("do_test", "evaluation", False, False, False),
        ("log_interval", "logging", False, False, False),
        ("use_wandb", "logging", False, False, False),
        ("temperature", "generation", False, False, False),
        ("rope_fusion", "nothing", False, False, False),
    ],
)
def test_a_key_declares_what_it_changes(
    key: str, changes: str, trains: bool, resumed: bool, owned: bool
) -> None:
    assert FACTS[key]["changes"] == changes
    assert (changes_training(key), same_on_resume(key)) == (trains, resumed)
    assert of_the_checkpoint(key) == owned


def test_keys_of_mappings_are_found_by_their_types() -> None:
    blocks = {"optimizer", "zero_optimization", "fp16", "bf16", "activation_checkpointing"}
    assert {*blocks, "rope_scaling", "attention_temperature"} == NESTED_BLOCKS
    free = {"data_types", "flops_profiler", "comms_logger", "deepspeed_extra_args"}
    assert free == FREE_BLOCKS
