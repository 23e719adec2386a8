"""Tables as matrices, and sums over diagonals as tables."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.engines.reference import dense_matrix, sum_by_distance

sizes = st.tuples(st.integers(1, 20), st.integers(0, 20))


def plain_matrix(table: torch.Tensor, q_len: int, k_len: int) -> torch.Tensor:
    position = torch.arange(k_len)
    distance = position[k_len - q_len :, None] - position[None, :]
    return torch.where(distance >= 0, table[:, distance.clamp(min=0)], 0.0)


@settings(deadline=None)
@given(sizes)
def test_dense_matrix_holds_the_table_by_distance(lengths: tuple[int, int]) -> None:
    q_len, k_len = lengths[0], sum(lengths)
    table = torch.randn(3, k_len + 2)
    expected = plain_matrix(table, q_len, k_len)
    assert torch.equal(dense_matrix(table, q_len, k_len), expected)


@settings(deadline=None)
@given(sizes)
def test_sum_by_distance_is_its_adjoint(lengths: tuple[int, int]) -> None:
    q_len, k_len = lengths[0], sum(lengths)
    table = torch.randn(2, k_len, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(2, q_len, k_len, dtype=torch.float64)
    (expected,) = torch.autograd.grad(plain_matrix(table, q_len, k_len), table, grad)
    torch.testing.assert_close(sum_by_distance(grad), expected)
