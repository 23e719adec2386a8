"""kerple_init: fit recovers known kernels, as scipy does, and measures what rotary adds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import least_squares

from megatron.model.position_base import DistanceKernel
from megatron.training.kernel_fit import Fit, _report, fit_kernel, rotary_scores
from tests.checkpoints.small_models import random_model, small_args, tokens
from tests.model.position_helpers import build
from tests.model.small_spec import SPEC

LENGTH = 96


def kernel(name: str, **values: list[float]) -> DistanceKernel:
    built = build(name, heads=3, head_dim=16)
    assert isinstance(built, DistanceKernel)
    built.set_kernel_values_({key: torch.tensor(value) for key, value in values.items()})
    return built


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("kerple_log", {"r1": [1.3, 0.4, 0.05], "r2": [0.7, 5.0, 0.02]}),
        ("kerple_power", {"r1": [0.3, 0.02, 1.0], "r2": [0.5, 1.9, 0.1]}),
    ],
)
def test_a_known_kernel_is_recovered_up_to_a_constant(
    name: str, values: dict[str, list[float]]
) -> None:
    target = kernel(name, **values)(LENGTH).bias
    assert target is not None
    fit = fit_kernel(kernel(name), target.detach() + 3.0)
    for key, value in values.items():
        torch.testing.assert_close(fit.values[key], torch.tensor(value).double(), rtol=1e-3, atol=0)
    assert (fit.error < 1e-3 * fit.size).all()


def test_noisy_scores_are_fitted_as_scipy_fits_them() -> None:
    target = kernel("kerple_log", r1=[1.3, 0.4, 0.2], r2=[0.7, 5.0, 0.3])(LENGTH).bias
    assert target is not None
    noise = torch.randn(target.shape, generator=torch.Generator().manual_seed(0))
    noisy = (target.detach() + 0.1 * noise).double()
    fit = fit_kernel(kernel("kerple_log"), noisy)
    d = np.arange(LENGTH)
    share = np.sqrt((LENGTH - d) / (LENGTH - d).sum())
    for head in range(3):
        found = least_squares(
            lambda p, h=head: share * (p[2] - p[0] * np.log1p(p[1] * d) - noisy[h].numpy()),
            x0=[1.0, 0.5, 0.0],
            bounds=([0.01, 0.01, -np.inf], [np.inf, 100.0, np.inf]),
            xtol=1e-12,
        )
        assert float(fit.values["r1"][head]) == pytest.approx(found.x[0], rel=1e-3)
        assert float(fit.values["r2"][head]) == pytest.approx(found.x[1], rel=1e-2)
        assert float(fit.error[head]) == pytest.approx(math.sqrt(2 * found.cost), rel=1e-4)


def test_what_rotary_adds_is_the_mean_of_all_pairs_at_a_distance() -> None:
    """Against dense scores of one layer; grouped heads of keys included."""
    args = small_args(pos_emb="rotary", num_kv_heads=2)
    model, text = random_model(args), tokens(length=12)
    seen: list[tuple[torch.Tensor, ...]] = []
    rotary = model.layers[1].attention.rotary
    assert rotary is not None
    handle = rotary.register_forward_hook(lambda _, inputs, out: seen.append((*inputs[:2], *out)))
    found = rotary_scores(model, text)
    handle.remove()
    q, k, turned_q, turned_k = (torch.cat(part) for part in zip(*seen, strict=True))
    k, turned_k = (x.repeat_interleave(2, dim=1) for x in (k, turned_k))
    added = (turned_q @ turned_k.mT - q @ k.mT) / math.sqrt(args.model.head_dim)
    for d in range(12):
        mean = added.diagonal(offset=-d, dim1=2, dim2=3).mean((0, 2))
        torch.testing.assert_close(found[1][:, d].float(), mean, rtol=1e-4, atol=1e-5)
    assert set(found) == {0, 1}


def test_the_report_counts_heads_from_1_as_all_others_do() -> None:
    error, size = torch.tensor([0.3, 0.1, 0.1, 0.1]), torch.ones(4)
    said = _report(SPEC, {"": Fit({}, error, size)}, 8192)
    assert (
        "error 0.150 of 1.000" in said and "worst 0.300 (head 1 of layers 1-2, both from 1)" in said
    )
