"""What two tensor-parallel ranks exchange, forward and backward."""

from __future__ import annotations

import pytest

from megatron.mpu.collectives import TensorParallel
from tests.processes import run_ranks


def test_two_ranks_get_each_others_parts_and_gradients() -> None:
    run_ranks(["tests/mpu/collectives_worker.py"], 2)


def test_an_uneven_split_says_what_to_change() -> None:
    with pytest.raises(ValueError, match="num_attention_heads = 6 cannot be split over model_pa"):
        TensorParallel(None, 0, 4).slice_of(6, "num_attention_heads")
