"""Sums of gates that lose nothing, and where the scalable softmax starts."""

from __future__ import annotations

import pytest
import torch

from megatron.model.layer_formulas import gate_sums, keys_seen, log_gates, softmax_scale_start


@pytest.mark.parametrize(("length", "window"), [(64, None), (64, 16), (1, None), (1024, None)])
def test_the_scalable_softmax_starts_as_sharp_as_a_plain_one(
    length: int, window: int | None
) -> None:
    start = softmax_scale_start(length, window)
    mean = keys_seen(length, window=window).double().log().mean()
    assert start * mean == pytest.approx(1.0) or length == 1


def test_sums_of_gates_lose_nothing_over_long_texts() -> None:
    """A running sum in fp32 would be off by several hundredths at the end."""
    logits = torch.randn(1, 20_000, 1, generator=torch.Generator().manual_seed(0))
    exact = torch.nn.functional.logsigmoid(logits.double()).cumsum(1)[..., 0]
    sums = gate_sums(log_gates(logits))[:, 0]
    assert float(exact[0, -1]) < -1e4
    assert float((sums - exact).abs().max()) < 1e-4


@pytest.mark.parametrize("length", [1, 3])
def test_gates_continue_where_the_cache_ends(length: int) -> None:
    gates = log_gates(torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0)))
    whole = gate_sums(gates)
    end = gate_sums(gates[..., length:], gate_sums(gates[..., :length])[..., -1])
    torch.testing.assert_close(end, whole[..., length:])
