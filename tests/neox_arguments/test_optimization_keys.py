"""What a batch is made of."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.neox_arguments import NeoXArgs
from tests.neox_arguments.samples import TINY


@pytest.mark.parametrize(
    ("values", "world", "plan"),
    [
        ({"train_micro_batch_size_per_gpu": 4}, 2, (8, 4, 1, 2)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, 2, (24, 4, 3, 2)),
        ({"train_micro_batch_size_per_gpu": 4, "train_batch_size": 32}, 2, (32, 4, 4, 2)),
        ({"train_batch_size": 32}, 4, (32, 8, 1, 4)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, 4, (32, 4, 2, 4)),
        ({"train_batch_size": 32, "model_parallel_size": 2, "pipe_parallel_size": 2}, 8,
         (32, 16, 1, 2)),
    ],
)  # fmt: skip
def test_batch_arithmetic(
    values: dict[str, Any], world: int, plan: tuple[int, int, int, int]
) -> None:
    config = {key: value for key, value in TINY.items() if "batch" not in key}
    found = NeoXArgs.from_dict({**config, **values}).batch_plan(world)
    assert plan == (
        found.train_batch_size,
        found.micro_batch_size,
        found.gradient_accumulation_steps,
        found.data_parallel_size,
    )


@pytest.mark.parametrize(
    ("values", "world", "fragments"),
    [
        ({"train_micro_batch_size_per_gpu": None}, 1, ["no batch size"]),
        ({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4}, 1, ["30", "28"]),
        ({"train_batch_size": 8, "gradient_accumulation_steps": 2}, 1, ["= 8", "= 4", "derived"]),
        ({"model_parallel_size": 2}, 3, ["3 processes", "multiple of 2"]),
    ],
)
def test_batch_arithmetic_explains(
    values: dict[str, Any], world: int, fragments: list[str]
) -> None:
    args = NeoXArgs.from_dict({**TINY, **values})
    with pytest.raises(ConfigError) as caught:
        args.batch_plan(world)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ({}, 10),
        ({"lr_decay_fraction": 0.75}, 7),
        ({"lr_decay_fraction": 0.5, "lr_decay_iters": 8}, 8),
    ],
)
def test_the_decay_ends_where_gpt_neoxs_does(values: dict[str, Any], steps: int) -> None:
    assert NeoXArgs.from_dict({**TINY, **values}).optimization.decay_iters == steps
