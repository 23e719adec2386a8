"""Every engine gives the numbers, and the gradients, of a plain float64 implementation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.engines import attention
from megatron.engines.cpu import tiled_forward_with_count
from megatron.errors import EngineError
from tests.engines.reference import (
    Case,
    draw_case,
    reference_attention,
    relative_error,
)

Engine = Callable[..., Tensor]

# batch, heads, queries, keys, head dim, window, tables
CASES = [
    (2, 3, 17, 17, 8, None, "bias+weight"),
    (1, 1, 1, 300, 64, None, "bias"),
    (1, 2, 1, 1, 16, None, "bias"),
    (1, 2, 96, 96, 64, 2, "bias"),
    (2, 5, 333, 777, 32, 50, "bias+weight"),
    (1, 3, 97, 1000, 80, 400, "bias"),
    (3, 2, 500, 500, 64, None, "bias"),
    (1, 7, 193, 385, 128, None, "weight"),
    (1, 2, 130, 130, 256, 129, "none"),
    (1, 2, 200, 200, 20, None, "bias"),
]


def check(case: Case, engine: Engine, tolerance: float) -> None:
    expected = case.output_and_gradients(reference_attention)
    actual = case.output_and_gradients(engine)
    errors = [relative_error(a, e) for a, e in zip(actual, expected, strict=True)]
    assert max(errors) < tolerance, errors


@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_output_and_gradients_match_float64(engine: Engine, sizes: tuple) -> None:
    *shape, window, tables = sizes
    check(draw_case(*shape, window=window, tables=tables), engine, 4e-6)


@pytest.mark.parametrize("sizes", CASES[:6], ids=str)
def test_bf16_in_and_out_is_fp32_inside(engine: Engine, sizes: tuple) -> None:
    *shape, window, tables = sizes
    case = draw_case(*shape, window=window, tables=tables, dtype=torch.bfloat16)
    assert engine(*case.tensors, window=window).dtype == torch.bfloat16
    check(case, engine, 2e-2)


def test_fp16_scores_beyond_its_range_do_not_overflow(engine: Engine) -> None:
    case = draw_case(1, 2, 40, 40, 64, dtype=torch.float16)
    q, k, *rest = (x if x is None else x.detach() for x in case.tensors)
    out = engine(q * 60, k * 60, *rest, scale=1e-4)  # q.k reaches 200,000, fp16 ends at 65,504
    assert relative_error(out, reference_attention(q * 60, k * 60, *rest, scale=1e-4)) < 5e-3


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_size_offset_and_window(engine: Engine, data: st.DataObject) -> None:
    q_len = data.draw(st.integers(1, 210))
    k_len = q_len + data.draw(st.integers(0, 210))
    case = draw_case(
        data.draw(st.integers(1, 2)),
        data.draw(st.integers(1, 5)),
        q_len,
        k_len,
        data.draw(st.sampled_from([1, 8, 24, 64])),
        window=data.draw(st.none() | st.integers(1, k_len + 3)),
        tables=data.draw(st.sampled_from(["none", "bias", "weight", "bias+weight"])),
        seed=data.draw(st.integers(0, 2**30)),
    )
    # A case may have gradients that are all rounding (one key): compare with their scale.
    expected = case.output_and_gradients(reference_attention)
    actual = case.output_and_gradients(engine)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e.double(), rtol=1e-4, atol=3e-5)


def test_layout_of_the_model_and_no_gradients(engine: Engine) -> None:
    """q, k, v as the model has them: slices of one [batch, length, heads, 3 * dim] product."""
    torch.manual_seed(0)
    qkv = torch.randn(2, 150, 3, 3 * 32)
    q, k, v = (x.transpose(1, 2) for x in qkv.split(32, dim=-1))
    with torch.no_grad():
        assert relative_error(engine(q, k, v), reference_attention(q, k, v)) < 2e-6


def test_cached_keys_give_the_last_rows_of_the_whole(engine: Engine) -> None:
    case = draw_case(1, 3, 200, 200, 32)
    q, *rest = case.tensors
    whole = engine(q, *rest)
    torch.testing.assert_close(
        engine(q[:, :, 120:], *rest), whole[:, :, 120:], rtol=1e-5, atol=1e-6
    )


def test_only_wanted_gradients_are_returned(engine: Engine) -> None:
    q, k, v, bias, weight = draw_case(1, 2, 60, 60, 16, tables="bias+weight").tensors
    grads = torch.autograd.grad(engine(q, k.detach(), v, bias, weight.detach()).sum(), [q, v, bias])
    expected = torch.autograd.grad(reference_attention(q, k, v, bias, weight).sum(), [q, v, bias])
    for actual, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(actual, other, rtol=1e-4, atol=2e-5)


def test_scores_with_huge_spread_stay_finite(engine: Engine) -> None:
    case = draw_case(1, 2, 300, 300, 64)
    q, *rest = case.tensors
    big = Case(((q.detach() * 300).requires_grad_(), *rest), None)
    for tensor in big.output_and_gradients(engine):
        assert tensor.isfinite().all()
    expected = reference_attention(*big.tensors)
    assert relative_error(engine(*big.tensors), expected) < 1e-3  # scores near 10^4 round at 10^-3


def test_a_nan_key_is_not_hidden_by_mask_or_pruning(engine: Engine) -> None:
    tensors = draw_case(1, 1, 600, 600, 16).tensors
    q, k, v, bias = (x.detach() for x in tensors if x is not None)
    k[0, 0, 200] = torch.nan
    out = engine(q, k, v, bias * 100)  # steep enough to prune the key, if it were a number
    assert out[0, 0, 200:].isnan().any(-1).all()


def test_threads_share_few_heads(tiled: Engine) -> None:
    """One head and two threads: the work of a head is split, and the partial sums added."""
    case = draw_case(1, 1, 700, 700, 32, tables="bias+weight")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check(case, tiled, 4e-6)
    finally:
        torch.set_num_threads(before)


def test_same_call_gives_the_same_bits(tiled: Engine) -> None:
    case = draw_case(2, 3, 400, 400, 32, tables="bias+weight")
    first, second = (case.output_and_gradients(tiled) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


_MEMORY_PROBE = """
import sys
import torch
from kerple import attention
torch.set_num_threads(1)
def megabytes(key):  # getrusage would count the parent process
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))
def run(length):
    q, k, v = (torch.randn(1, 4, length, 32, requires_grad=True) for _ in range(3))
    bias = (-torch.arange(length).log1p()).repeat(4, 1).requires_grad_()
    terms = {}
    if sys.argv[1] == "features":
        sizes = {"query_features": (1, 4, length, 16), "distance_features": (4, 16, length // 2)}
        terms = {name: torch.randn(size, requires_grad=True) for name, size in sizes.items()}
        terms["row_scale"] = torch.rand(1, 4, length).add(0.5).requires_grad_()
    attention(q, k, v, bias, engine="tiled", **terms).sum().backward()
run(256)
before = megabytes('VmRSS')
run(8192)
print(megabytes('VmHWM') - before)
"""


@pytest.mark.parametrize("terms", ["plain", "features"])
@pytest.mark.parametrize("backend", ["compiled", "python"])
def test_memory_grows_with_length_not_its_square(backend: str, terms: str) -> None:
    """4 heads at 8,192: dense scores alone would be 1 GiB, and so would a bias of each query."""
    result = subprocess.run(
        [sys.executable, "-c", _MEMORY_PROBE, terms],
        env={**os.environ, "KERPLE_TILED_BACKEND": backend},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(result.stdout) < 160, result.stdout


def test_dropout_is_seeded_and_keeps_the_mean() -> None:
    q, k, v, bias, _ = draw_case(2, 2, 64, 64, 16).tensors
    attend = partial(attention, q, k, v, bias, dropout=0.3)
    first = attend(generator=torch.Generator().manual_seed(5))
    assert torch.equal(first, attend(generator=torch.Generator().manual_seed(5)))
    assert not torch.equal(first, attend(generator=torch.Generator().manual_seed(6)))
    generator = torch.Generator().manual_seed(7)
    mean = torch.stack([attend(generator=generator).detach() for _ in range(400)]).mean(0)
    assert (mean - attention(q, k, v, bias)).abs().mean() < 0.03


# Query features times distance features, and a factor of the whole score.

# batch, heads, key heads, queries, keys, head dim, features, extent, heads of the table
FEATURE_CASES = [
    (2, 4, 2, 130, 130, 16, 3, 40, 4),
    (1, 3, 3, 210, 500, 24, 16, 200, 1),
    (1, 2, 1, 97, 97, 64, 20, 300, 2),  # further than there are keys
    (1, 2, 2, 300, 300, 32, 64, 1, 2),
    (1, 2, 2, 1, 77, 8, 5, 9, 1),
]


def draw_row_terms(sizes: tuple[int, ...], seed: int = 0) -> dict[str, Tensor]:
    batch, heads, _, q_len, _, _, count, extent, table_heads = sizes
    torch.manual_seed(seed)
    return {
        "query_features": torch.randn(batch, heads, q_len, count).requires_grad_(),
        "distance_features": (0.5 * torch.randn(table_heads, count, extent)).requires_grad_(),
        "row_scale": (0.3 + 1.5 * torch.rand(batch, 1, q_len)).requires_grad_(),
    }


def check_row_terms(
    engine: Engine, sizes: tuple[int, ...], names: Sequence[str], tolerance: float, **others: Any
) -> None:
    batch, heads, key_heads, q_len, k_len, dim, *_ = sizes
    dtype = others.pop("dtype", torch.float32)
    case = draw_case(batch, heads, q_len, k_len, dim, tables=others.pop("tables", "bias"))
    terms = {name: x for name, x in draw_row_terms(sizes).items() if name in names}
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in case.tensors[:3])
    k, v = (x[:, :key_heads].detach().requires_grad_() for x in (k, v))
    tables = case.tensors[3:]
    floating = [x for x in others.values() if isinstance(x, Tensor) and x.is_floating_point()]
    wanted = [q, k, v, *(x for x in tables if x is not None), *terms.values(), *floating]
    found = []
    for attend in (reference_attention, engine):
        out = attend(q, k, v, *tables, **terms, **others)
        torch.manual_seed(5)
        grads = torch.autograd.grad(out, wanted, torch.randn(out.shape).to(out.dtype))
        found.append([out, *grads])
    errors = [relative_error(a, e) for e, a in zip(*found, strict=True)]
    assert max(errors) < tolerance, errors


FEATURES = ("query_features", "distance_features")


@pytest.mark.parametrize("sizes", FEATURE_CASES, ids=str)
@pytest.mark.parametrize("names", [FEATURES, ("row_scale",), (*FEATURES, "row_scale")], ids=str)
def test_features_and_row_scale_match_float64(
    engine: Engine, sizes: tuple[int, ...], names: tuple[str, ...]
) -> None:
    check_row_terms(engine, sizes, names, 1e-5)


def test_features_and_row_scale_with_every_other_operand(engine: Engine) -> None:
    sizes = (2, 4, 2, 200, 260, 16, 7, 90, 4)
    torch.manual_seed(3)
    others: dict[str, Any] = {
        "key_bias": torch.randn(2, 4, 260).cumsum(-1).requires_grad_(),
        "first_key": (torch.arange(60, 260) // 50 * 40).expand(2, -1),
        "sink": torch.randn(4).requires_grad_(),
        "window": 150,
        "scale": 0.2,
        "tables": "bias+weight",
    }
    check_row_terms(engine, sizes, (*FEATURES, "row_scale"), 3e-5, **others)


def test_features_in_bf16_are_fp32_inside(engine: Engine) -> None:
    names = (*FEATURES, "row_scale")
    check_row_terms(engine, FEATURE_CASES[0], names, 3e-2, dtype=torch.bfloat16)


def test_features_shared_by_threads(tiled: Engine) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        sizes = (1, 1, 1, 700, 700, 32, 16, 300, 1)
        check_row_terms(tiled, sizes, (*FEATURES, "row_scale"), 1e-5)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_pruning_with_features_and_row_scale_changes_nothing(tiled: Engine, factor: float) -> None:
    """A steep bias lets keys go; features and the factor move where that is allowed."""
    sizes = (1, 2, 2, 900, 900, 16, 4, 64, 2)
    q, k, v = (x.detach() for x in draw_case(1, 2, 900, 900, 16).tensors[:3])
    terms = {name: x.detach() for name, x in draw_row_terms(sizes).items()}
    terms["row_scale"] = terms["row_scale"] * factor
    bias = -0.3 * torch.arange(903.0).expand(2, -1)
    out = tiled(q, k, v, bias, **terms)
    expected = reference_attention(q, k, v, bias, **terms)
    assert relative_error(out, expected) < 2e-6
    _, count = tiled_forward_with_count(
        *(q, k, v, bias, None, None, None, None, *terms.values()), scale=None
    )
    assert (count.visited < count.total) == (factor > 1)


def test_features_are_repeatable_to_the_bit(tiled: Engine) -> None:
    sizes = (1, 2, 2, 300, 300, 16, 8, 100, 1)
    case, runs = draw_case(1, 2, 300, 300, 16), []
    for _ in range(2):
        terms = draw_row_terms(sizes)
        out = tiled(*case.tensors, **terms)
        runs.append(torch.autograd.grad(out.square().sum(), list(terms.values())))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_row_scale_beside_large_key_biases(
    engine: Engine, dtype: torch.dtype, sink: bool
) -> None:
    """Key biases of 5,000 cancel but for their differences: no rounding of theirs may be left."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 16).to(dtype) for _ in range(3))
    key_bias = torch.rand(1, 2, 64).mul(160).cumsum(-1)
    row_scale = (0.5 + torch.rand(1, 1, 64)).requires_grad_()
    others = {"key_bias": key_bias, "sink": key_bias + torch.randn(1, 2, 1) if sink else None}
    found = []
    for attend in (reference_attention, engine):
        out = attend(q, k, v, row_scale=row_scale, **others)
        grad = torch.ones_like(out)
        grad[..., ::2] = -1
        found.append(torch.autograd.grad(out, row_scale, grad)[0])
    scale = found[0].abs().max().clamp(min=1.0)
    tolerance = 2e-4 if dtype == torch.float32 else 5e-2
    assert float((found[1] - found[0]).abs().max() / scale) < tolerance


def test_a_row_scale_that_is_not_positive_and_finite_is_refused() -> None:
    q = torch.randn(1, 1, 9, 8)
    for value in (0.0, -1.0, torch.inf, torch.nan):
        with pytest.raises(EngineError, match="row_scale must be positive and finite"):
            attention(q, q, q, row_scale=torch.full((1, 1, 9), value))
    with pytest.raises(EngineError, match="first_key must be a tensor"):
        attention(q, q, q, first_key=[0] * 9)  # type: ignore[arg-type]
