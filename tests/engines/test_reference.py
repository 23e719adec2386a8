"""Tables as matrices, and sums over diagonals as tables."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.engines.reference import dense_matrix, fused_softmax, sum_by_distance

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


# The fused softmax is the plain one: scale, weight, bias, mask, window, softmax; fp32 inside.


def plain_softmax(
    scores: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    scale: float,
    window: int | None,
) -> Tensor:
    q_len, k_len = scores.shape[-2:]
    distance = torch.arange(k_len - q_len, k_len)[:, None] - torch.arange(k_len)[None, :]
    logits = scores.double() * scale
    if weight is not None:
        logits = logits * weight.double()[:, distance.clamp(min=0)]
    if bias is not None:
        logits = logits + bias.double()[:, distance.clamp(min=0)]
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.softmax(logits.masked_fill(hidden, -math.inf), -1)


def draw(q_len: int, k_len: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(q_len)
    scores = torch.randn(2, 3, q_len, k_len) * 4
    bias, weight = -torch.rand(3, k_len + 1) * 5, torch.rand(3, k_len + 1)
    return scores.to(dtype).requires_grad_(), bias.requires_grad_(), weight.requires_grad_()


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("tables", ["none", "bias", "weight", "bias+weight"])
@pytest.mark.parametrize(("q_len", "k_len"), [(13, 13), (5, 20)])
def test_probabilities_and_gradients(
    q_len: int, k_len: int, tables: str, window: int | None
) -> None:
    scores, bias, weight = draw(q_len, k_len)
    bias, weight = (bias if "bias" in tables else None), (weight if "weight" in tables else None)
    wanted = [x for x in (scores, bias, weight) if x is not None]
    actual = fused_softmax(scores, bias, weight, scale=0.7, window=window)
    expected = plain_softmax(scores, bias, weight, 0.7, window)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-7)
    grad = torch.randn(expected.shape, dtype=torch.float64)
    for a, e in zip(
        torch.autograd.grad(actual, wanted, grad.float()),
        torch.autograd.grad(expected, wanted, grad),
        strict=True,
    ):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


def test_gradients_by_finite_differences_in_float64() -> None:
    tensors = [x.detach().double().requires_grad_() for x in draw(4, 7)]
    assert torch.autograd.gradcheck(lambda *x: fused_softmax(*x, scale=0.5, window=4), tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once_at_the_end(dtype: torch.dtype) -> None:
    scores, bias, weight = draw(64, 64, dtype)
    actual = fused_softmax(scores, bias, weight, scale=0.7)
    assert actual.dtype == dtype
    expected = plain_softmax(scores, bias, weight, 0.7, None).to(dtype)
    different = (actual != expected).float().mean()
    assert different < 0.01  # fp32 against float64 may round to the other neighbour, rarely


def test_large_scores_in_fp16_do_not_overflow_inside() -> None:
    scores = torch.full((1, 1, 3, 3), 60000.0, dtype=torch.float16)
    probs = fused_softmax(scores, scale=8.0)
    torch.testing.assert_close(probs[0, 0, 2].float(), torch.full((3,), 1 / 3), rtol=1e-3, atol=0)


def test_rows_sum_to_one_and_hidden_keys_get_exactly_zero() -> None:
    scores, bias, weight = draw(30, 50)
    probs = fused_softmax(scores, bias, weight, window=5)
    torch.testing.assert_close(probs.sum(-1), torch.ones(2, 3, 30))
    distance = torch.arange(30)[:, None] + 20 - torch.arange(50)[None, :]
    assert probs[..., (distance < 0) | (distance >= 5)].eq(0).all()


def test_a_row_whose_keys_are_all_hidden_has_no_probabilities() -> None:
    scores, _, _ = draw(5, 5)
    key_bias = torch.zeros(2, 3, 5)
    key_bias[..., :2] = -math.inf
    probs = fused_softmax(scores, key_bias=key_bias)
    torch.testing.assert_close(probs.sum(-1), (torch.arange(5) >= 2).float().expand(2, 3, 5))
    assert probs[..., :2].eq(0).all()
