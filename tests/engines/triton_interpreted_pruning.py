"""Tests of the Triton engine's pruning in Triton's interpreter (see triton_interpreted.py)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.engines import attention
from megatron.engines.call import checked_call
from megatron.engines.pruning import MIN_KEYS, decay_bounds, head_windows
from megatron.engines.triton_pruning import can_decay, visible_distances
from megatron.engines.triton_runtime import Launch, interpreted
from tests.engines.triton_cases import (
    Case,
    Inputs,
    assert_same,
    inputs_of,
    outputs_and_gradients,
    run_triton,
)

assert interpreted(), "set TRITON_INTERPRET=1"
# scores of the future may overflow before they are masked
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LENGTH = 300
STEEP = Case(LENGTH, LENGTH, 32)


def steep(case: Case) -> Inputs:
    """A head that decays within the length, and one that hardly falls."""
    inputs = inputs_of(case)
    slopes = torch.tensor([[2.0], [0.01]])
    inputs["bias"] = (-slopes * torch.arange(case.k_length)).requires_grad_()
    return inputs


def counts_of(inputs: Inputs, **settings: float) -> Tensor | None:
    return visible_distances(checked_call(**inputs, scale=0.2, **settings))


@pytest.mark.parametrize(
    "case",
    [
        replace(STEEP, q_length=120, weight=True),
        replace(STEEP, heads=2, key_heads=1, key_bias="small", sink="head"),
        replace(STEEP, dtype=torch.float16),
        replace(STEEP, q_length=60, features=(2, 40), row_scale="head"),
    ],
    ids=str,
)
def test_what_is_pruned_changes_nothing(case: Case) -> None:
    inputs = steep(case)
    visible = counts_of(inputs)
    assert visible is not None
    assert visible.dtype == torch.int32
    assert 1 <= visible[0] < LENGTH
    assert visible[1] == LENGTH
    plain = outputs_and_gradients(run_triton, inputs, scale=0.2)
    pruned = outputs_and_gradients(run_triton, inputs, scale=0.2, visible=visible)
    assert_same(pruned, plain, 1e-6 if case.dtype == torch.float32 else 1e-3)


def test_the_bound_is_at_least_as_tight_as_that_of_the_other_engines() -> None:
    inputs = steep(replace(STEEP, weight=True))
    call = checked_call(**inputs, scale=0.2)
    found, bounds = counts_of(inputs), decay_bounds(call)
    assert found is not None
    assert bounds is not None
    other = head_windows(call, bounds)
    assert (found <= other).all()
    assert found[0] >= other[0] - 20


def test_features_and_row_scales_widen_the_bound_as_in_the_other_engines() -> None:
    inputs = steep(replace(STEEP, features=(2, 40), row_scale="head"))
    call = checked_call(**inputs, scale=0.2)
    found, bounds = counts_of(inputs), decay_bounds(call)
    assert found is not None and bounds is not None
    without = counts_of(inputs | dict.fromkeys(("query_features", "distance_features")))
    plain = counts_of(inputs | dict.fromkeys(("row_scale", "query_features", "distance_features")))
    assert without is not None and plain is not None
    assert plain[0] < without[0] < found[0] < LENGTH
    # that of the other engines has the least own score of all its terms together
    assert 0 <= found[0] - head_windows(call, bounds)[0] <= 20


def test_every_head_is_pruned_by_its_own_row_of_the_tables() -> None:
    inputs = steep(STEEP)
    inputs["bias"] = inputs["bias"].detach().flip(0)
    visible = counts_of(inputs)
    assert visible is not None
    assert visible[0] == LENGTH
    assert 1 <= visible[1] < LENGTH


def test_a_gate_that_lifts_far_keys_forbids_pruning_them() -> None:
    inputs = steep(replace(STEEP, key_bias="small"))
    plain = counts_of(inputs)
    with torch.no_grad():  # the first keys stand out by more than the table falls
        inputs["key_bias"][0, 0, :5] += 1000.0
    lifted = counts_of(inputs)
    assert plain is not None
    assert lifted is not None
    assert plain[0] < LENGTH
    assert lifted[0] == LENGTH


class Counter:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches = 0
        self.reads = 0
        run, read = Launch.run, Tensor.__bool__

        def counted_run(launch: Launch) -> None:
            self.launches += 1
            run(launch)

        def counted_read(x: Tensor) -> bool:
            self.reads += 1
            return read(x)

        monkeypatch.setattr(Launch, "run", counted_run)
        monkeypatch.setattr(Tensor, "__bool__", counted_read)


def test_tables_that_do_not_decay_cost_one_look_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of(STEEP)
    inputs["bias"] = -2.0 * torch.log1p(torch.arange(float(LENGTH))).expand(2, -1)
    counter = Counter(monkeypatch)
    for _layer in range(12):
        assert counts_of(inputs) is None
    assert (counter.launches, counter.reads) == (0, 1)


def test_tables_that_decay_cost_two_launches_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = steep(STEEP)
    counter = Counter(monkeypatch)
    for _layer in range(3):
        assert counts_of(inputs) is not None
    assert (counter.launches, counter.reads) == (6, 1)


def test_a_table_that_changed_is_looked_at_again() -> None:
    bias = torch.zeros(1, LENGTH)
    assert not can_decay(bias, LENGTH)
    bias[0, -1] = -1000.0
    assert can_decay(bias, LENGTH)
    assert not can_decay(bias, LENGTH - 1)
    bias[0, 0] = math.nan
    assert not can_decay(bias, LENGTH)


@torch.inference_mode()
def test_tables_made_in_inference_mode_are_pruned_alike() -> None:
    """As evaluation and generation make them: such tensors have no version."""
    inputs = steep(STEEP)
    inputs["bias"] = inputs["bias"] * 1.0
    assert inputs["bias"].is_inference()
    pruned = attention(**inputs, scale=0.2, engine="triton")
    assert_same({"out": pruned}, {"out": run_triton(**inputs, scale=0.2)}, 1e-6)
    visible = counts_of(inputs)
    assert visible is not None and visible[0] < LENGTH


def test_nothing_is_pruned_without_a_bias_or_below_some_length() -> None:
    inputs = steep(STEEP)
    assert counts_of(inputs, window=MIN_KEYS - 1) is None
    assert counts_of({**inputs, "bias": None}) is None
