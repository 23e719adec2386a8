"""The benchmark compares like with like."""

from __future__ import annotations

import torch

from tools.benchmarks.contenders import Inputs, dense_forward, sdpa_dense_bias, tiled


def test_contenders_with_a_log_bias_compute_the_same() -> None:
    inputs = Inputs(2, 3, 70, 16, train=True)
    expected = tiled(inputs, "kerple_log")()
    for contender in (dense_forward(inputs), sdpa_dense_bias(inputs)):
        torch.testing.assert_close(contender(), expected, rtol=1e-4, atol=1e-5)


def test_training_contender_leaves_no_gradients_behind() -> None:
    inputs = Inputs(1, 2, 40, 16, train=True)
    tiled(inputs, "kerple_power")()
    assert inputs.q.grad is None
