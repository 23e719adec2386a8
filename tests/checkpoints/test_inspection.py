"""What differs between two checkpoints; the words and numbers of one are the command's test."""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.checkpoints import read_checkpoint
from megatron.checkpoints.inspection import compare, kernel_of
from megatron.commands.kernel_tools import subjects
from megatron.errors import CheckpointError
from tests.checkpoints.small_models import at_rest, random_model, saved_model, small_args

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


def test_kernels_of_a_pattern_are_told_by_their_layers(tmp_path: Path) -> None:
    """Each once, whichever layers share it, and drawn so."""
    pattern = [{"count": 2, "pos_emb": "kerple_log"}, {"pos_emb": "none"}, {"pos_emb": "alibi"}]
    model = saved_model(tmp_path, num_layers=5, layer_pattern=pattern)
    log, alibi = kernel_of(read_checkpoint(tmp_path), 64)
    assert (log["layers"], log["pos_emb"], log["layer"]) == ([0, 1, 4], "kerple_log", None)
    assert (alibi["layers"], alibi["values"]) == ([3], {})
    values = next(iter(model.positional_embeddings())).kernel_values()
    assert log["values"] == {name: value.tolist() for name, value in values.items()}
    drawn = list(subjects([str(tmp_path)], Namespace(iteration=None, length=32)))
    assert [(d.title.partition(": ")[2], d.file.name) for d in drawn] == [
        ("KERPLE-log at step 5, layers 1-2, 5 (from 1)", "kernels_0.png"),
        ("ALiBi at step 5, layer 4 (from 1)", "kernels_1.png"),
    ]
