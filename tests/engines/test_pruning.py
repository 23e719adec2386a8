"""Pruning leaves out much, changes nothing beyond rounding, and backs off under adverse inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.engines.call import checked_call
from megatron.engines.cpu import tiled_forward_with_count
from megatron.engines.pruning import decay_bounds, head_windows
from tests.engines.reference import Case

Engine = Callable[..., Tensor]
LENGTH, HEADS, DIM = 2048, 4, 32
SLOPES = torch.tensor([1.0, 0.25, 0.05, 0.001])


def alibi(length: int = LENGTH) -> Tensor:
    return -SLOPES[:, None] * torch.arange(length)


def draw(length: int = LENGTH, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(1, HEADS, length, DIM) for _ in range(3)]


def assert_pruning_changes_only_rounding(
    attend: Engine, tensors: list[Tensor | None], tolerance: float = 3e-6
) -> None:
    case = Case(tuple(None if x is None else x.requires_grad_() for x in tensors), None)
    pruned = case.output_and_gradients(lambda *x, window: attend(*x, window=window, pruning=True))
    full = case.output_and_gradients(lambda *x, window: attend(*x, window=window, pruning=False))
    for a, b in zip(pruned, full, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max()


def share(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, weight: Tensor | None = None) -> float:
    return tiled_forward_with_count(q, k, v, bias, weight)[1].share


def test_steep_heads_are_pruned_and_the_result_is_the_same(tiled: Engine) -> None:
    q, k, v = draw()
    assert share(q, k, v, alibi()) < 0.7  # causality alone: 1; one head of four cannot prune
    assert tiled_forward_with_count(q, k, v, alibi(), pruning=False)[1].share == 1.0
    assert_pruning_changes_only_rounding(tiled, [q, k, v, alibi(), None])


def test_flat_tables_are_not_pruned(tiled: Engine) -> None:
    q, k, v = draw()
    log = -torch.arange(LENGTH).log1p().repeat(HEADS, 1)
    assert decay_bounds(checked_call(q, k, v, log)) is None
    assert share(q, k, v, log) == 1.0


def test_huge_queries_and_keys_prune_less(tiled: Engine) -> None:
    q, k, v = draw()
    assert share(q * 40, k * 40, v, alibi()) == 1.0
    assert share(q * 4, k, v, alibi()) > share(q, k, v, alibi())
    # Scores in the hundreds: what is left is the engine's own rounding, pruned or not.
    assert_pruning_changes_only_rounding(tiled, [q * 6, k * 6, v, alibi(), None])


def test_one_outlier_key_far_away_is_still_seen(tiled: Engine) -> None:
    """A key so large that it wins over any decay, for the queries that point to it."""
    q, k, v = draw()
    k[:, :, 3] = 40 * q[:, :, 2000]
    v[:, :, 3] = 5.0
    out = tiled(q, k, v, alibi())
    assert (out[0, 3, 2000] - 5.0).abs().max() < 1e-3  # slope 0.001: it does win there
    assert_pruning_changes_only_rounding(tiled, [q, k, v, alibi(), None])


def test_one_outlier_query(tiled: Engine) -> None:
    q, k, v = draw()
    q[:, :, 1500] *= 50
    assert_pruning_changes_only_rounding(tiled, [q, k, v, alibi(), None])


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e20])
def test_values_of_any_size_count(tiled: Engine, size: float) -> None:
    """A far value 10^20 times the near ones shows; a far zero still takes its share of weight."""
    q, k, v = draw(1024)
    v[:, :, 100] *= size
    pruned, full = (tiled(q, k, v, alibi(), pruning=pruning) for pruning in (True, False))
    error = (pruned - full).abs() / full.abs().amax(-1, keepdim=True)
    assert error.max() < 1e-5


def test_non_monotone_table_keeps_its_far_bump(tiled: Engine) -> None:
    q, k, v = draw()
    table = alibi()
    table[:, 1700:1720] = 2.0
    assert share(q, k, v, table) > share(q, k, v, alibi())
    assert_pruning_changes_only_rounding(tiled, [q, k, v, table, None])


def test_weight_table_is_part_of_the_bound(tiled: Engine) -> None:
    q, k, v = draw()
    growing = torch.linspace(1.0, 200.0, LENGTH).repeat(HEADS, 1)
    assert share(q, k, v, alibi(), growing) > share(q, k, v, alibi())
    assert_pruning_changes_only_rounding(tiled, [q, k, v, alibi(), growing], tolerance=2e-5)
    signed = torch.cos(torch.arange(LENGTH) / 50).repeat(HEADS, 1)
    assert_pruning_changes_only_rounding(tiled, [q, k, v, alibi(), signed])


def test_window_and_offset_compose_with_pruning(tiled: Engine) -> None:
    q, k, v = draw()
    q = q[:, :, 700:]
    for window in (None, 333):
        pruned, full = (
            tiled(q, k, v, alibi(), window=window, pruning=pruning) for pruning in (True, False)
        )
        torch.testing.assert_close(pruned, full, rtol=1e-5, atol=1e-6)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**30),
    length=st.integers(256, 900),
    spread=st.floats(0.1, 12.0),
    steep=st.floats(0.05, 30.0),
    bumps=st.integers(0, 3),
)
def test_adverse_draws(
    tiled: Engine, seed: int, length: int, spread: float, steep: float, bumps: int
) -> None:
    q, k, v = draw(length, seed)
    q, k = (
        q * torch.rand(1, HEADS, length, 1) * spread,
        k * torch.rand(1, HEADS, length, 1) * spread,
    )
    table = alibi(length) * steep
    for at in torch.randint(length, (bumps,)):
        table[:, at] = 3.0 * torch.randn(())
    pruned, full = (tiled(q, k, v, table, pruning=pruning) for pruning in (True, False))
    torch.testing.assert_close(pruned, full, rtol=0.0, atol=1e-5)


def test_head_windows_are_true_bounds() -> None:
    """Beyond its window a head's keys hold less than 2^-24 of the own key's weight, in sum."""
    q, k, v = draw()
    call = checked_call(q, k, v, alibi())
    bounds = decay_bounds(call)
    assert bounds is not None
    windows = head_windows(call, bounds)
    assert windows.tolist() == sorted(windows.tolist())
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None, :]
    for head, window in enumerate(windows.tolist()):
        scores = (q[0, head] @ k[0, head].T).double() * DIM**-0.5 - SLOPES[head] * distance
        beyond = torch.where(distance >= window, scores, -torch.inf)
        excess = torch.logsumexp(beyond, 1) - scores.diagonal()
        assert excess.max() < -24 * 0.6931


def test_each_head_is_bounded_by_its_own_keys_and_by_the_largest_bias_so_far() -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, 256, 16)
    k, v = torch.randn(2, 2, 256, 16), torch.randn(2, 2, 256, 16)
    k[:, 1] *= 8  # of heads 2 and 3
    bias = -torch.arange(256.0).repeat(4, 1)

    def windows(**terms: Tensor) -> Tensor:
        call = checked_call(q, k, v, bias, **terms)
        bounds = decay_bounds(call)
        assert bounds is not None
        return head_windows(call, bounds)

    plain = windows()
    assert plain[:2].max() + 50 < plain[2:].min() < 256
    lifted = torch.zeros(1, 1, 256)
    lifted[..., 3] = 20.0
    assert torch.equal(windows(key_bias=lifted), plain + 20)
