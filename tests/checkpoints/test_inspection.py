"""What differs between two checkpoints; the words and numbers of one are the command's test."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron.checkpoints.inspection import compare, kernel_of
from megatron.errors import CheckpointError
from tests.checkpoints.small_models import at_rest, random_model, small_args

NAME = "2.attention.dense.bias"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_none_differs_from_one_that_is(value: float) -> None:
    args = small_args()
    checkpoint = at_rest(random_model(args), args)
    other = replace(checkpoint, weights={n: t.clone() for n, t in checkpoint.weights.items()})
    other.weights[NAME][3] = value
    assert [found["name"] for found in compare(checkpoint, other)] == [NAME]
    assert [found["name"] for found in compare(other, checkpoint)] == [NAME]
    assert list(compare(other, other)) == []


def test_a_difference_is_told_beside_the_spread_of_the_weights() -> None:
    args = small_args()
    checkpoint = at_rest(random_model(args), args)
    other = replace(checkpoint, weights={n: t.clone() for n, t in checkpoint.weights.items()})
    checkpoint.weights[NAME] = torch.tensor([0.0, 2.0]).repeat(len(other.weights[NAME]) // 2)
    other.weights[NAME] = checkpoint.weights[NAME] + 0.5
    (found,) = compare(checkpoint, other)
    assert "differs by up to 0.5 (standard deviation 1)" in str(found)


def test_a_kernel_that_does_not_fit_its_config_is_named() -> None:
    args = small_args(pos_emb="kerple_log")
    checkpoint = at_rest(random_model(args), args)
    checkpoint.weights["1.embedding.r1"] = torch.ones(3)
    with pytest.raises(CheckpointError, match="its kernel does not fit its config"):
        kernel_of(checkpoint)
