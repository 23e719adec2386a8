"""What two tensor-parallel ranks exchange, forward and backward; ranks that share sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.mpu.collectives import TensorParallel
from megatron.neox_arguments import NeoXArgs
from tests.processes import run_ranks
from tests.training.cases import ADAM, layout, run_cases, tiny_config, write_data


def test_two_ranks_get_each_others_parts_and_gradients() -> None:
    run_ranks(["tests/mpu/collectives_worker.py"], 2)


def test_an_uneven_split_says_what_to_change() -> None:
    with pytest.raises(ValueError, match="num_attention_heads = 6 cannot be split over model_pa"):
        TensorParallel(None, 0, 4).slice_of(6, "num_attention_heads")


# Ranks that share sequences; tests/stories/test_layouts.py compares their training.


def test_a_checkpoint_resumes_with_another_number_of_ranks_for_a_sequence(tmp_path: Path) -> None:
    """Also its training state: ZeRO 2 over two ranks that share sequences, or do not."""
    data, save = write_data(tmp_path), str(tmp_path / "save")
    config = tiny_config(data, optimizer=ADAM, **layout(zero=2))
    shared = {**config, "sequence_parallel_size": 2}
    cases = {
        "whole": {"config": config, "steps": 4},
        "first": {"config": shared, "steps": 2, "save": save, "export": f"{save}_universal"},
        "second": {"config": config, "steps": 2, "resume": save},
        "again": {"config": shared, "steps": 2, "resume": save},
    }
    found = run_cases(cases, tmp_path / "two", 2)
    one = {"config": tiny_config(data, optimizer=ADAM), "steps": 2, "resume": f"{save}_universal"}
    found |= run_cases({"one": one}, tmp_path / "one", 1)
    expected = found["whole"]["losses"]
    assert found["first"]["losses"] == pytest.approx(expected[:2], rel=2e-5)
    for name in ("second", "again", "one"):
        assert found[name]["losses"] == pytest.approx(expected[2:], rel=1e-4), name


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seq_length": 15}, "does not divide seq_length = 15. Use seq_length 14"),
        ({"num_kv_heads": 1}, "does not divide num_kv_heads = 1: .* sequence_parallel_size 1"),
        ({"model_parallel_size": 4}, "num_attention_heads = 4 / model_parallel_size 4"),
    ],
)
def test_what_does_not_combine_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    config = tiny_config("data", sequence_parallel_size=2) | changes
    with pytest.raises(ConfigError, match=f"sequence_parallel_size = 2 {says}|{says}"):
        NeoXArgs.from_dict(config)


def test_the_batch_counts_a_sequence_once() -> None:
    args = NeoXArgs.from_dict(tiny_config("data", sequence_parallel_size=2))
    plan = args.batch_plan(4)
    assert (plan.data_parallel_size, plan.gradient_accumulation_steps) == (2, 2)
    with pytest.raises(ConfigError, match=r"3 processes hold 3 copies .* Start a multiple of 2"):
        args.batch_plan(3)
    with pytest.raises(ConfigError, match=r"sequence_parallel = True .* sequence_parallel_size"):
        NeoXArgs.from_dict(tiny_config("data", sequence_parallel=True))
