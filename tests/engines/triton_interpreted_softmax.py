"""Tests of the fused softmax in Triton's interpreter, on CPU (see triton_interpreted.py)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron.engines import triton_softmax
from megatron.engines.triton_runtime import interpreted
from megatron.engines.triton_softmax import can_run_softmax, triton_fused_softmax
from tests.engines.triton_cases import assert_same, in_double, outputs_and_gradients

assert interpreted(), "set TRITON_INTERPRET=1"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def reference_softmax(
    scores: Tensor,
    bias: Tensor | None,
    weight: Tensor | None = None,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    q_length, k_length = scores.shape[-2:]
    d = torch.arange(k_length - q_length, k_length)[:, None] - torch.arange(k_length)[None, :]
    hidden = (d < 0) | (d >= (k_length if window is None else window))
    scores = scores * scale
    if weight is not None:
        scores = scores * weight[:, d.clamp(0)]
    if bias is not None:
        scores = scores + bias[:, d.clamp(0)]
    return scores.masked_fill(hidden, -math.inf).softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("q_length", "k_length", "window", "tables"),
    [(9, 9, None, "bias"), (3, 150, 60, "both"), (8, 19, None, "weight"), (7, 7, 5, "none")],
)
def test_fused_softmax_matches_the_dense_formula(
    q_length: int, k_length: int, window: int | None, tables: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    bias = -3 * torch.rand(2, k_length + 3)
    weight = 0.2 + torch.rand(2, k_length + 3)
    inputs = {
        "scores": torch.randn(2, 2, q_length, k_length).to(dtype).requires_grad_(),
        "bias": bias.requires_grad_() if tables in ("bias", "both") else None,
        "weight": weight.requires_grad_() if tables in ("weight", "both") else None,
    }
    settings = {"scale": 0.5, "window": window}
    found = outputs_and_gradients(triton_fused_softmax, inputs, **settings)
    expected = outputs_and_gradients(reference_softmax, in_double(inputs), **settings)
    assert found["out"].dtype == dtype
    assert_same(found, expected, 2e-5 if dtype == torch.float32 else 4e-3)


def test_fused_softmax_beyond_one_block_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_softmax, "_MAX_BLOCK", 16)
    inputs = {
        "scores": torch.randn(1, 2, 4, 70, requires_grad=True),
        "bias": (-torch.rand(2, 70)).requires_grad_(),
        "weight": None,
    }
    settings = {"scale": 0.5, "window": 40}
    found = outputs_and_gradients(triton_fused_softmax, inputs, **settings)
    expected = outputs_and_gradients(reference_softmax, in_double(inputs), **settings)
    assert_same(found, expected, 2e-5)
    again = outputs_and_gradients(triton_fused_softmax, inputs, **settings)
    assert all(torch.equal(x, again[name]) for name, x in found.items())


def test_fused_softmax_reasons_not_to_run() -> None:
    assert can_run_softmax(torch.zeros(1, 1, 2, 2)) is None
    assert "float64" in (can_run_softmax(torch.zeros(1, 1, 2, 2).double()) or "")
    many = torch.zeros(1, 1, 2, 2).expand(65_536, -1, -1, -1)
    assert "batch 65536" in (can_run_softmax(many) or "")
