"""Attention dropout: statistics against torch's own, one mask in all engines, gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from megatron.engines import attention
from megatron.engines.call import checked_call
from megatron.engines.dropout import kept, row_keys
from megatron.errors import EngineError
from tests.engines.conftest import force
from tests.engines.reference import relative_error
from tests.engines.test_call import Draw

Engine = Callable[..., Tensor]


def masks(batch: int, heads: int, length: int, dropout: float, seed: int = 1) -> Tensor:
    q = torch.empty(batch, heads, length, 1)
    call = checked_call(q, q, q, dropout=dropout, seed=torch.tensor(seed))
    return kept(row_keys(call), 0, length, dropout)


def test_mean_and_variance_are_those_of_torchs_attention_dropout() -> None:
    """Over many equal sequences, each with a mask of its own."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 12, 8).expand(3000, -1, -1, -1) for _ in "qkv")
    ours = attention(q, k, v, dropout=0.3, seed=7)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.3)
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0]
    error = (ours.var(0) / len(q)).sqrt() + 1e-7
    assert ((ours.mean(0) - exact).abs() / error).max() < 5
    ratio = ours.var(0) / theirs.var(0)
    assert (ratio - 1).abs().max() < 0.2 and (ratio.mean() - 1).abs() < 0.02


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.93])
def test_weights_are_dropped_independently(dropout: float) -> None:
    """The rate of every row and column, and no correlation of neighbours along any axis."""
    mask = torch.stack([masks(3, 4, 192, dropout, seed) for seed in (0, 1, 2**40, -1)]).double()
    centred = mask - (1 - dropout)
    variance = dropout * (1 - dropout)
    assert centred.mean().abs() < 4.5 * (variance / mask.numel()) ** 0.5
    for axis in range(mask.dim()):
        means = centred.mean(axis)
        assert means.abs().max() < 6 * (variance / mask.shape[axis]) ** 0.5 + 5 / mask.shape[axis]
        assert (means.var() * mask.shape[axis] / variance - 1).abs() < 0.05
        for step in (1, 2):
            size = mask.shape[axis] - step
            near, far = centred.narrow(axis, 0, size), centred.narrow(axis, step, size)
            assert (near * far).mean().abs() / variance < 4.5 / near.numel() ** 0.5


def test_every_engine_drops_the_same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal scores and the identity as values, the output is the mask; also of 37 queries."""
    keys = 101
    q, k = torch.zeros(2, 3, keys, keys), torch.zeros(2, 1, keys, keys)
    v = torch.eye(keys).expand(2, 1, keys, keys)
    expected = masks(2, 3, keys, 0.25, seed=11).tril()
    for name in ("naive", "compiled", "python"):
        attend = force(name, monkeypatch)
        for queries in (keys, 37):
            out = attend(q[:, :, -queries:], k, v, dropout=0.25, seed=11)
            assert torch.equal(out > 0, expected[:, :, -queries:]), name


@pytest.mark.parametrize(
    "draw",
    [
        Draw(tables="bias+weight", key_heads=3),
        Draw(terms="first_key", q_len=301, k_len=301),
        Draw(terms="none", tables="none", window=50, q_len=97, k_len=97, dim=24),
        Draw(dtype=torch.bfloat16),
    ],
    ids=["all", "documents", "plain", "bf16"],
)
def test_gradients_are_those_of_dense_scores_in_float64(engine: Engine, draw: Draw) -> None:
    def twin(**arguments: Tensor) -> Tensor:
        wide = {
            name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
            for name, x in arguments.items()
        }
        return attention(**wide, engine="naive", dropout=0.2, seed=3)  # type: ignore[arg-type]

    if draw.dtype == torch.float32:
        heads, rows = draw.heads, draw.q_len
        draw.arguments["query_features"] = torch.randn(2, heads, rows, 3).requires_grad_()
        draw.arguments["distance_features"] = torch.randn(heads, 3, 40).requires_grad_()
        draw.arguments["row_scale"] = (0.5 + torch.rand(2, heads, rows)).requires_grad_()
    expected = draw.output_and_gradients(twin)
    actual = draw.output_and_gradients(lambda **x: engine(**x, dropout=0.2, seed=3))
    tolerance = 2e-5 if draw.dtype == torch.float32 else 2e-2
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    assert max(errors.values()) < tolerance, errors


def test_a_new_seed_is_the_same_graph(tiled: Engine) -> None:
    torch._dynamo.reset()
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in "qkv")
    count = CompileCounter()
    compiled = torch.compile(
        lambda seed: tiled(q, k, v, dropout=0.2, seed=seed), backend=count, fullgraph=True
    )
    for seed in (1, 2):
        whole = torch.tensor(seed)
        assert torch.equal(compiled(whole), tiled(q, k, v, dropout=0.2, seed=seed))
    assert count.frame_count == 1


def test_a_seed_is_one_integer() -> None:
    q = torch.randn(1, 1, 8, 8)
    call = checked_call(q, q, q, dropout=0.5, seed=torch.tensor(1))
    assert torch.equal(row_keys(call), row_keys(replace(call, seed=torch.tensor([1]))))
    for seed in (torch.tensor(1.0), torch.tensor([1, 2])):
        with pytest.raises(EngineError, match="seed must be one integer; got"):
            attention(q, q, q, dropout=0.5, seed=seed)
