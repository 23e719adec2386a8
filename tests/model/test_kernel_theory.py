"""The paper's theory holds for our tables, and the checks reject what the theory rejects."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.errors import KernelAnalysisError
from megatron.model.kernel_theory import (
    bf16_error,
    cpd_margin,
    effective_length,
    heads_within,
    is_cpd,
    is_pd,
    kernel_matrix,
    smallest_shift,
    training_problems,
)
from megatron.model.position_base import DistanceKernel, TableEmbedding
from megatron.model.position_names import build_positional_embedding, kernel, position_options
from megatron.neox_arguments.catalogue import METHODS

POINTS = 48
SCALES = st.floats(0.01, 20)
EXPONENTS = st.floats(0.01, 2)
CPD = ["kerple_log", "kerple_power", "kerple_log3", "kerple_bias_wht", "ape"]
GAUSSIAN_BIAS = ["gauss_bias2", "gauss_bias3"]
WEIGHTS = ["kerple_bias_wht", "gauss_wht1", "gauss_wht2", "ape"]

property_test = settings(max_examples=40, deadline=None)


def embedding(name: str, heads: int = 1) -> TableEmbedding:
    return kernel(name, heads=heads, head_dim=64)


def tables_of(name: str, data: st.DataObject, points: int = POINTS):
    """Float64 tables of a kernel with parameters anywhere inside its constraints."""
    kernel = embedding(name)
    assert isinstance(kernel, DistanceKernel)
    kernel.double()
    for parameter, spec in kernel.learnable.items():
        value = data.draw(EXPONENTS if spec.maximum == 2 else SCALES, label=parameter)
        with torch.no_grad():
            kernel.get_parameter(parameter).fill_(value)
    with torch.no_grad():
        return kernel(points)


@pytest.mark.parametrize("name", CPD)
@property_test
@given(data=st.data())
def test_kernels_are_cpd_zero_at_zero_and_decreasing(name: str, data) -> None:
    bias = tables_of(name, data).bias
    assert is_cpd(bias)
    assert bias[0, 0] == 0
    assert (bias.diff() < 0).all()


@pytest.mark.parametrize("name", GAUSSIAN_BIAS)
@property_test
@given(data=st.data())
def test_gaussian_biases_are_pd_and_fall(name: str, data) -> None:
    bias = tables_of(name, data).bias
    assert is_pd(bias) and is_cpd(bias)
    assert (bias.diff() <= 0).all() and (bias >= 0).all()


@pytest.mark.parametrize("name", WEIGHTS)
@property_test
@given(data=st.data())
def test_weights_are_pd_from_one_down_to_zero(name: str, data) -> None:
    weight = tables_of(name, data).weight
    assert is_pd(weight)
    assert weight[0, 0] == 1
    assert (weight.diff() <= 0).all() and (weight >= 0).all()


@property_test
@given(p=st.floats(2.02, 6), points=st.integers(8, 64))
def test_powers_above_two_are_not_cpd(p: float, points: int) -> None:
    d = torch.arange(points, dtype=torch.float64)
    assert not is_cpd(-(d**p))
    assert not is_pd(torch.exp(-((d / points) ** p) * 4))  # Schoenberg: exp(-|x|^p) neither
    with pytest.raises(KernelAnalysisError, match="not CPD"):
        smallest_shift(-(d**p))


@pytest.mark.parametrize("name", ["alibi", "sandwich", "kerple_power_original"])
@pytest.mark.parametrize("heads", [8, 12])
def test_fixed_kernels_are_cpd_in_fp32(name: str, heads: int) -> None:
    assert is_cpd(embedding(name, heads)(128).bias)


def test_t5_bias_need_not_be_cpd() -> None:
    assert not is_cpd(embedding("rpe", 12)(128).bias)


@property_test
@given(data=st.data(), shift=st.integers(0, 30))
def test_kernel_matrix_is_symmetric_and_shift_invariant(data, shift: int) -> None:
    matrix = kernel_matrix(tables_of("kerple_log3", data).bias[0])
    assert torch.equal(matrix, matrix.T)
    assert torch.equal(matrix[shift:, shift:], matrix[: POINTS - shift, : POINTS - shift])


def test_cpd_by_definition_on_random_zero_sum_vectors() -> None:
    """is_cpd means what Definition 2 says, for a kernel that is CPD and one that is not."""
    d = torch.arange(24, dtype=torch.float64)
    c = torch.randn(24, 20000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    c -= c.mean(0)
    alternating = torch.tensor([1.0, -3.0, 3.0, -1.0], dtype=torch.float64)

    def quadratic_form(table: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return (c * (kernel_matrix(table, len(c)) @ c)).sum(0)

    assert quadratic_form(-(d**1.5), c).min() > 0
    assert quadratic_form(-(d**3), alternating) < 0
    assert is_cpd(-(d**1.5)) and not is_cpd(-(d**3))


def test_margin_is_the_smallest_value_of_the_form_per_head() -> None:
    d = torch.arange(16, dtype=torch.float64)
    margins = cpd_margin(torch.stack([-d, -(d**3), torch.cos(d)]))
    assert margins.shape == (3,)
    assert margins[0] > 0 > margins[1]
    assert margins[2].abs() < 1e-12  # cos is PD of rank two: zero on the rest
    assert not is_cpd(torch.stack([-d, -(d**3)]))


def test_a_constant_does_not_change_cpd_but_pd() -> None:
    d = torch.arange(32, dtype=torch.float64)
    assert is_cpd(-d) and is_cpd(-d + 1000) and is_cpd(-d - 1000)
    assert not is_pd(-d) and is_pd(-d + 1000)


@property_test
@given(p=st.floats(0.05, 1.9), a=st.floats(0.01, 10), points=st.integers(3, 40))
def test_shift_lemma(p: float, a: float, points: int) -> None:
    """Strictly CPD kernels become PD at c = -1 / (1' K^-1 1), and the search finds it within 2x."""
    d = torch.arange(points, dtype=torch.float64)
    table = -a * d**p
    matrix = kernel_matrix(table)
    exact = -1 / torch.linalg.inv(matrix).sum().item()
    found = smallest_shift(table)
    assert math.log2(found) == int(math.log2(found)) >= 1
    assert found >= exact * (1 - 1e-6)
    assert found == 2 or found / 2 <= exact * (1 + 1e-6)
    assert is_pd(table + found) and not is_pd(table + exact * 0.98)
    assert smallest_shift(table, precision=1e-3) == pytest.approx(exact, rel=2e-3)


def test_alibis_smallest_shift_is_half_the_largest_distance() -> None:
    d = torch.arange(33, dtype=torch.float64)
    assert smallest_shift(-d) == 16
    assert smallest_shift(-d, points=21, precision=1e-6) == pytest.approx(10, rel=1e-5)
    assert smallest_shift(torch.exp(-d)) == 0


def test_negative_squared_distance_is_cpd_but_no_shift_makes_it_pd() -> None:
    d = torch.arange(16, dtype=torch.float64)
    assert is_cpd(-(d**2))
    with pytest.raises(KernelAnalysisError, match="not strictly"):
        smallest_shift(-(d**2))


@pytest.mark.parametrize(
    "call",
    [
        lambda t: is_cpd(t, points=9),
        lambda t: is_cpd(t, points=1),
        lambda t: smallest_shift(t[None]),
        lambda t: effective_length(embedding("gauss_wht1")),
    ],
)
def test_impossible_questions_are_refused(call) -> None:
    with pytest.raises(KernelAnalysisError):
        call(-torch.arange(8.0))


class TestEffectiveLength:
    def test_alibi_by_hand(self) -> None:
        # slopes 1/2, 1/4, ..., 1/256: -slope d < -2 first at d = 2/slope + 1
        assert effective_length(embedding("alibi", 8)) == [2 * 2**h + 1 for h in range(1, 9)]

    def test_table_threshold_and_reach(self) -> None:
        table = -torch.arange(50.0)[None] * torch.tensor([[1.0], [0.1], [0.01]])
        assert effective_length(table) == [3, 21, None]
        assert effective_length(table, max_distance=20) == [3, None, None]
        assert effective_length(torch.full((1, 4), -3.0)) == [0]

    @property_test
    @given(r1=st.floats(0.05, 3), r2=st.floats(0.05, 3))
    def test_log_closed_form(self, r1: float, r2: float) -> None:
        kernel = embedding("kerple_log")
        kernel.double()
        with torch.no_grad():
            kernel.r1.fill_(r1)
            kernel.r2.fill_(r2)
        boundary = math.expm1(min(2 / r1, 700)) / r2  # -r1 log(1 + r2 d) = -2
        [found] = effective_length(kernel)
        if boundary > 20480 * (1 + 1e-9):
            assert found is None
        elif boundary < 20480 * (1 - 1e-9):
            assert found in {math.floor(boundary * (1 - 1e-9)) + 1, math.floor(boundary) + 1}

    def test_bumps_never_get_there(self) -> None:
        assert effective_length(embedding("gauss_bias2", 3)) == [None] * 3

    def test_cumulative_heads(self) -> None:
        counts = heads_within([3, None, 5, 3], max_distance=6)
        assert counts.tolist() == [0, 0, 0, 2, 2, 3, 3]
        paper = heads_within(effective_length(embedding("alibi", 8)))
        assert paper.shape == (20481,)
        assert paper[512] == 7 and paper[513] == 8


def test_what_every_method_of_ours_can_be_trained_with() -> None:
    """Values and gradients are finite from distance 0 to 4,095, and bf16 is precise enough."""
    for name in METHODS:
        module = build_positional_embedding(name, position_options(heads=4, head_dim=32))
        if isinstance(module, TableEmbedding):
            assert training_problems(module, 4096) == [], name


def test_bf16_error_counts_only_where_the_bias_counts() -> None:
    assert bf16_error(torch.tensor([[0.0, -1.0, -1e6 - 3]])) == 0.0
    assert bf16_error(torch.tensor([[1001.0, 1000.0]])) == 1.0
