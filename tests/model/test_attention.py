"""A layer with gates, sinks, the scalable softmax and features of queries against the papers, in
float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.model import GPTModel
from megatron.model.attention import SelfAttention
from megatron.model.position_base import Tables
from tests.model import small_spec

HEADS, WIDTH = 4, 8
SPEC = small_spec.SPEC.replace(pos_emb="none")
KEYS = ("forget_gate", "attention_sinks", "scalable_softmax")
ALL = dict.fromkeys(KEYS, True)
INKLING = {"pos_emb": "inkling", "inkling_features": 3, "inkling_distances": 6}
CABLE = {"pos_emb": "cable"}
ROWS = {"pos_emb": "bam_ssmax"}
HOT = {"attention_temperature": {"floor": 3, "alpha": 0.5}}


def layer(**keys: Any) -> SelfAttention:
    """One attention layer whose learned numbers are far from where they start."""
    spec = SPEC.replace(num_layers=1, init_method_std=0.3, **keys)
    attention = GPTModel(spec).layers[0].attention
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in attention.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator))
    return attention


def from_the_papers(attention: SelfAttention, x: Tensor, table: Tensor | None = None) -> Tensor:
    """Each query's row written out: nothing here knows of cumulative sums or key biases."""
    weights = {name: p.detach().double() for name, p in attention.named_parameters()}
    x = x.double()
    qkv = x @ weights["query_key_value.weight"].T + weights["query_key_value.bias"]
    q, k, v = qkv.view(*x.shape[:2], HEADS, 3, WIDTH).unbind(3)
    rows = torch.zeros(*x.shape[:2], HEADS, WIDTH, dtype=torch.float64)
    for b in range(x.shape[0]):
        for h in range(HEADS):
            for i in range(x.shape[1]):
                first = 0 if attention.window is None else max(0, i + 1 - attention.window)
                seen = range(first, i + 1)
                sharper = 1.0
                if "softmax_scale" in weights:
                    sharper = float(weights["softmax_scale"][h]) * math.log(len(seen))
                logits = []
                for j in seen:
                    logit = sharper * (q[b, i, h] @ k[b, j, h]) / math.sqrt(WIDTH)
                    if table is not None:
                        logit = logit + table[h, i - j].double()
                    if "forget_gate.weight" in weights:
                        for later in range(j + 1, i + 1):
                            gate = torch.sigmoid(
                                x[b, later] @ weights["forget_gate.weight"][h]
                                + weights["forget_gate.bias"][h]
                            )
                            logit = logit + torch.log(gate)
                    logit = logit + by_content(weights, x[b], h, i, j)
                    if attention.temperature is not None:
                        floor, alpha = attention.temperature
                        logit = logit * (1 + alpha * math.log(max(1.0, (i + 1) / floor)))
                    logits.append(logit)
                if "terms.row_scale" in weights:  # with one key, the factor of two
                    factor = max(float(weights["terms.row_scale"][h]), 0.01)
                    logits = [factor * math.log(max(len(seen), 2)) * logit for logit in logits]
                if "sinks" in weights:
                    logits.append(weights["sinks"][h])
                shares = torch.stack(logits).exp()
                shares = shares / shares.sum()
                for share, j in zip(shares, seen, strict=False):
                    rows[b, i, h] += share * v[b, j, h]
    return rows.flatten(2) @ weights["dense.weight"].T + weights["dense.bias"]


def by_content(weights: dict[str, Tensor], x: Tensor, head: int, query: int, key: int) -> Tensor:
    """What Inkling's features or CABLE's steps add to one score."""
    if "terms.distance_features" in weights:
        table = weights["terms.distance_features"]
        if query - key >= table.shape[1]:
            return torch.zeros((), dtype=torch.float64)
        features = weights["terms.weight"].view(HEADS, len(table), -1)[head] @ x[query]
        return features @ table[:, query - key]
    if "terms.bias" in weights:
        w, b = weights["terms.weight"][head], weights["terms.bias"][head]
        return -sum(
            (torch.log1p(torch.exp(x[t] @ w + b)) for t in range(key + 1, query + 1)), b - b
        )
    return torch.zeros((), dtype=torch.float64)


@pytest.mark.parametrize("engine", ["naive", "tiled"])
@pytest.mark.parametrize(
    "keys",
    [
        *({key: True} for key in KEYS),
        ALL,
        {**ALL, "sliding_window_width": 4, **HOT},
        {**ALL, **INKLING},
        {**ALL, **CABLE},
        {**ALL, **ROWS, **HOT, "sliding_window_width": 4},
    ],
    ids=lambda keys: "+".join(keys),
)
def test_a_layer_is_the_papers_formula(keys: dict[str, Any], engine: str) -> None:
    attention = layer(**keys)
    attention.engine = engine
    x = torch.randn(2, 19, HEADS * WIDTH, generator=torch.Generator().manual_seed(2))
    table = -torch.arange(19.0) * torch.tensor([[0.0], [0.1], [0.3], [1.0]])
    with torch.no_grad():
        found = attention(x, Tables(table, None))
    expected = from_the_papers(attention, x, table)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "keys",
    [{"forget_gate": True}, {**ALL, **HOT}, INKLING, CABLE, {"attention_sinks": True, **ROWS}],
    ids=lambda keys: "+".join(keys),
)
def test_engines_agree_in_every_gradient(keys: dict[str, Any]) -> None:
    found: dict[str, dict[str, Tensor]] = {}
    for engine in ("naive", "tiled"):
        attention = layer(num_kv_heads=2, **keys)
        attention.engine = engine
        x = torch.randn(2, 37, HEADS * WIDTH, generator=torch.Generator().manual_seed(3))
        x.requires_grad_()
        attention(x, Tables()).square().sum().backward()
        assert x.grad is not None
        found[engine] = {"x": x.grad} | {
            name: p.grad for name, p in attention.named_parameters() if p.grad is not None
        }
        assert set(found[engine]) == {"x", *(name for name, _ in attention.named_parameters())}
    for name, gradient in found["naive"].items():
        gap = (found["tiled"][name] - gradient).abs().max() / gradient.abs().max()
        assert float(gap) < 5e-5, name


def test_gates_start_as_in_the_reference_and_sinks_as_one_more_zero() -> None:
    attention = GPTModel(SPEC.replace(**ALL)).layers[0].attention
    assert attention.forget_gate is not None and attention.sinks is not None
    assert not attention.forget_gate.bias.any() and not attention.sinks.any()
    assert float(attention.forget_gate.weight.detach().std()) == pytest.approx(0.02, rel=0.2)
