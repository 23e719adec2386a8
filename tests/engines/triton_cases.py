"""Attention calls for the tests of the Triton engine, and the dense formula in float64."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.engines.call import checked_call
from megatron.engines.dropout import kept, kept_scale, row_keys
from megatron.engines.triton_attention import pruned_attention
from tests.conftest import REPOSITORY

Inputs = dict[str, Tensor | None]


@dataclass(frozen=True)
class Case:
    q_length: int
    k_length: int
    head_dim: int
    window: int | None = None
    bias: bool = True
    weight: bool = False
    batch: int = 1
    heads: int = 2
    key_heads: int | None = None
    key_bias: str | None = None  # small, gate (cumulative sums to 1e4), pad (-inf)
    documents: int | None = None  # length of the documents packed into a sequence
    sink: str | None = None  # head, row
    features: tuple[int, int] | None = None  # how many, and their distances
    shared_features: bool = False  # one distance feature for all heads
    row_scale: str | None = None  # row (all alike), head
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32
    rounded_to: torch.dtype | None = None  # inputs rounded to this precision first


def inputs_of(case: Case, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def rounded(heads: int, length: int) -> Tensor:
        x = normal(case.batch, heads, length, case.head_dim)
        return x.to(case.rounded_to or case.dtype).to(case.dtype).requires_grad_()

    # longer than needed, and not monotone: the engine must not assume either
    table_shape = (case.heads, case.k_length + 7)
    bias = -3 * torch.rand(table_shape, generator=generator)
    weight = 0.2 + torch.rand(table_shape, generator=generator)
    key_heads = case.key_heads or case.heads
    sink_shape = (case.heads,) if case.sink == "head" else (case.batch, case.heads, case.q_length)
    return {
        "q": rounded(case.heads, case.q_length),
        "k": rounded(key_heads, case.k_length),
        "v": rounded(key_heads, case.k_length),
        "bias": bias.requires_grad_() if case.bias else None,
        "weight": weight.requires_grad_() if case.weight else None,
        "key_bias": key_bias_of(case, generator),
        "sink": normal(*sink_shape).requires_grad_() if case.sink else None,
        "first_key": first_keys(case),
        **features_of(case, generator),
    }


def features_of(case: Case, generator: torch.Generator) -> Inputs:
    inputs: Inputs = {"query_features": None, "distance_features": None, "row_scale": None}
    kind = case.rounded_to or case.dtype
    if case.features is not None:
        count, extent = case.features
        shape = (case.batch, case.heads, case.q_length, count)
        query = torch.randn(shape, generator=generator) * (2.0 / count) ** 0.5
        table = torch.randn(
            1 if case.shared_features else case.heads, count, extent, generator=generator
        )
        inputs["query_features"] = query.to(kind).to(case.dtype).requires_grad_()
        inputs["distance_features"] = table.to(kind).float().requires_grad_()
    if case.row_scale is not None:
        one = (
            (1, 1, case.q_length)
            if case.row_scale == "row"
            else (case.batch, case.heads, case.q_length)
        )
        inputs["row_scale"] = (0.3 + 1.5 * torch.rand(one, generator=generator)).requires_grad_()
    return inputs


def key_bias_of(case: Case, generator: torch.Generator) -> Tensor | None:
    if case.key_bias is None:
        return None
    if case.key_bias == "gate":  # many small steps, some large ones
        steps = torch.rand(case.batch, case.heads, case.k_length, generator=generator)
        steps = torch.where(steps < 0.5, 0.1 * steps, 200 * steps)
        sums = steps.cumsum(-1)
        return (sums * (1e4 / sums.max())).requires_grad_()
    if case.key_bias == "pad":  # at the beginning, so that rows see nothing, and in the middle
        x = torch.randn(case.batch, 1, case.k_length, generator=generator)
        x[..., : case.k_length // 3] = -math.inf
        x[..., case.k_length // 2 : case.k_length // 2 + 5] = -math.inf
        return x.requires_grad_()
    return torch.randn(1, case.heads, case.k_length, generator=generator).requires_grad_()


def first_keys(case: Case) -> Tensor | None:
    """Documents of one length, and another length in every further sequence."""
    if case.documents is None:
        return None
    positions = torch.arange(case.k_length - case.q_length, case.k_length)
    sizes = [case.documents + 9 * i for i in range(case.batch)]
    return torch.stack([positions // size * size for size in sizes])


def run_triton(
    q: Tensor, *tensors: Tensor | None, visible: Tensor | None = None, **options: Any
) -> Tensor:
    """The engine itself, for any call that the check lets pass, without its own pruning."""
    if "seed" in options:
        options["seed"] = torch.tensor(options["seed"])
    return pruned_attention(checked_call(q, *tensors, **options), visible)


def dropout_of(case: Case) -> dict[str, Any]:
    """The call's settings."""
    return {"dropout": case.dropout, "seed": 2**40 + 3} if case.dropout else {}


def kept_weights(case: Case) -> dict[str, Any]:
    """The settings of `reference_attention` for the same dropout."""
    if not case.dropout:
        return {}
    q = torch.empty(case.batch, case.heads, case.q_length, 1)
    k = torch.empty(case.batch, case.heads, case.k_length, 1)
    seed = torch.tensor(dropout_of(case)["seed"])
    rows = row_keys(checked_call(q, k, k, dropout=case.dropout, seed=seed))
    return {"factors": kept(rows, 0, case.k_length, case.dropout) * kept_scale(case.dropout)}


def outputs_and_gradients(
    function: Callable[..., Tensor], inputs: Inputs, grad: Tensor | None = None, **settings: Any
) -> dict[str, Tensor]:
    out = function(**inputs, **settings)
    if grad is None:
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    given = {name: x for name, x in inputs.items() if x is not None and x.requires_grad}
    gradients = torch.autograd.grad(out, list(given.values()), grad.to(out.dtype))
    return {"out": out.detach()} | {f"d{name}": g for name, g in zip(given, gradients, strict=True)}


def in_double(inputs: Inputs) -> Inputs:
    return {
        name: x if x is None or not x.is_floating_point() else x.detach().double().requires_grad_()
        for name, x in inputs.items()
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].shape == x.shape, name
        error = (found[name].double() - x.double()).abs().max().item()
        # "not <=", so that a NaN fails
        assert error <= tolerance * max(1.0, x.abs().max().item()), f"{name}: {error:.2e}"


def python(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )


def check_in_interpreter(name: str) -> None:
    """Run a file of tests in a process of its own: the interpreter is chosen at import."""
    result = python(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"tests/engines/{name}"],
        TRITON_INTERPRET="1",
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout
