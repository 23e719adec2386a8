"""Tests of the Triton engine in Triton's interpreter, on CPU.

TRITON_INTERPRET=1 must be set before Triton is imported, so test_triton_attention.py runs this
file in a process of its own; its name keeps it out of the ordinary collection. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/engines/triton_interpreted.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from megatron.engines import attention
from megatron.engines import triton_attention as engine
from megatron.engines.triton_attention import can_run, triton_attention
from megatron.engines.triton_compat import interpreted
from megatron.engines.triton_softmax import can_run_softmax, triton_fused_softmax
from megatron.errors import EngineError

assert interpreted(), "set TRITON_INTERPRET=1"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows past the end: 0/0


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
    dtype: torch.dtype = torch.float32


def inputs_of(case: Case, seed: int = 0) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    shape = (case.batch, case.heads)

    def normal(length: int) -> Tensor:
        x = torch.randn(*shape, length, case.head_dim, generator=generator)
        return x.to(case.dtype).requires_grad_()

    # longer than needed, and not monotone: the engine must not assume either
    table_shape = (case.heads, case.k_length + 7)
    bias = -3 * torch.rand(table_shape, generator=generator)
    weight = 0.2 + torch.rand(table_shape, generator=generator)
    return {
        "q": normal(case.q_length),
        "k": normal(case.k_length),
        "v": normal(case.k_length),
        "bias": bias.requires_grad_() if case.bias else None,
        "weight": weight.requires_grad_() if case.weight else None,
    }


def distances(q_length: int, k_length: int, q_offset: int) -> Tensor:
    return (q_offset + torch.arange(q_length))[:, None] - torch.arange(k_length)[None, :]


def reference_softmax(
    scores: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    *,
    scale: float,
    window: int | None,
    q_offset: int,
) -> Tensor:
    d = distances(scores.shape[-2], scores.shape[-1], q_offset)
    hidden = (d < 0) | (d >= (scores.shape[-1] if window is None else window))
    scores = scores * scale
    if weight is not None:
        scores = scores * weight[:, d.clamp(0)]
    if bias is not None:
        scores = scores + bias[:, d.clamp(0)]
    return scores.masked_fill(hidden, -math.inf).softmax(-1)


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    *,
    window: int | None,
    scale: float,
) -> Tensor:
    q_offset = k.shape[2] - q.shape[2]
    scores = q @ k.transpose(-1, -2)
    return (
        reference_softmax(scores, bias, weight, scale=scale, window=window, q_offset=q_offset) @ v
    )


def outputs_and_gradients(
    function, inputs: dict[str, Tensor | None], grad: Tensor | None = None, **settings
) -> dict[str, Tensor]:
    out = function(**inputs, **settings)
    if grad is None:
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    given = {name: x for name, x in inputs.items() if x is not None}
    gradients = torch.autograd.grad(out, list(given.values()), grad.to(out.dtype))
    return {"out": out.detach()} | {f"d{name}": g for name, g in zip(given, gradients, strict=True)}


def in_double(inputs: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {
        name: None if x is None else x.detach().double().requires_grad_()
        for name, x in inputs.items()
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].shape == x.shape, name
        error = (found[name].double() - x.double()).abs().max().item()
        assert error <= tolerance * max(1.0, x.abs().max().item()), f"{name}: {error:.2e}"


def check(case: Case, tolerance: float, scale: float | None = None) -> None:
    scale = case.head_dim**-0.5 if scale is None else scale
    inputs = inputs_of(case)
    settings = {"window": case.window, "scale": scale}
    found = outputs_and_gradients(triton_attention, inputs, **settings)
    expected = outputs_and_gradients(reference_attention, in_double(inputs), **settings)
    assert found["out"].dtype == case.dtype
    assert_same(found, expected, tolerance)


CASES = [
    Case(70, 70, 64),
    Case(64, 64, 32, bias=False),
    Case(40, 73, 32, weight=True, batch=2, heads=1),  # cached keys
    Case(50, 50, 80, bias=False, weight=True, heads=1),  # padded head dim, weight alone
    Case(70, 70, 128, window=40, heads=1),
    Case(50, 91, 32, window=17, bias=False, heads=1),  # window and cached keys, no tables
    Case(45, 45, 64, window=1, weight=True, heads=1),  # only itself
    Case(1, 75, 64, weight=True),  # generation: one query
    Case(1, 1, 32),
    Case(40, 40, 40),  # not a multiple of 16
    # above 128 the products over the head dimension are taken in slices
    Case(35, 35, 160, heads=1),
    Case(21, 38, 160, window=19, weight=True, batch=2, heads=1),
    Case(35, 52, 256, window=30, weight=True),
    Case(33, 33, 256, bias=False, weight=True, heads=1),
    Case(18, 41, 200, bias=False, window=25, heads=1),
    Case(1, 40, 256, weight=True, heads=1),
    Case(20, 20, 129, heads=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_every_gradient_match_the_dense_formula(case: Case) -> None:
    check(case, tolerance=2e-5)


@pytest.mark.parametrize(
    "case",
    [
        Case(70, 70, 64, dtype=torch.float16),
        Case(65, 90, 96, weight=True, window=50, dtype=torch.float16),
        Case(20, 36, 256, heads=1, weight=True, window=30, dtype=torch.float16),
        Case(34, 50, 192, heads=1, dtype=torch.float16),
    ],
    ids=str,
)
def test_half_precision_rounds_but_agrees(case: Case) -> None:
    check(case, tolerance=4e-3)


@pytest.mark.parametrize("pruning", [False, True])
def test_the_attention_function_gives_the_numbers_of_the_naive_engine(pruning: bool) -> None:
    inputs = steep(Case(40, 60, 32, weight=True))
    found, expected = (
        outputs_and_gradients(attention, inputs, window=50, engine=name, pruning=pruning)
        for name in ("triton", "naive")
    )
    assert_same(found, expected, 2e-5)


def test_scale_is_applied_to_scores_and_gradients() -> None:
    check(Case(40, 40, 32, weight=True), tolerance=5e-5, scale=0.7)


@pytest.mark.parametrize("case", [Case(70, 70, 32, batch=2), Case(40, 40, 256)], ids=str)
def test_two_runs_agree_bit_for_bit(case: Case) -> None:
    case = replace(case, weight=True, heads=1)
    first, second = (
        outputs_and_gradients(triton_attention, inputs_of(case), window=50, scale=0.2)
        for _ in range(2)
    )
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


@pytest.mark.parametrize("processors", [1, 64])
def test_sharing_a_head_between_programs_changes_no_gradient(
    processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_INTERPRETER_PROCESSORS", processors)
    splits = []
    build = engine.backward_launches

    def spy(*args, **kwargs):
        launches, result = build(*args, **kwargs)
        splits.append(result.dq_shares.shape[0])
        return launches, result

    monkeypatch.setattr(engine, "backward_launches", spy)
    check(Case(60, 130, 32, weight=True, heads=1), tolerance=2e-5)
    assert splits == ([2] if processors == 1 else [5])


def test_views_of_a_fused_projection_need_no_layout_of_their_own() -> None:
    torch.manual_seed(0)
    length, heads, dim = 40, 3, 32
    fused = torch.randn(2, length, heads, 3 * dim, requires_grad=True)
    q, k, v = (x.transpose(1, 2) for x in fused.chunk(3, dim=-1))
    assert not q.is_contiguous()
    assert engine.aligned(q) is q
    bias = -torch.rand(heads, length)
    out = triton_attention(q, k, v, bias, scale=0.3)
    expected = reference_attention(q, k, v, bias, None, window=None, scale=0.3)
    (found_grad,) = torch.autograd.grad(out.square().sum(), fused)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), fused)
    assert_same({"out": out, "d": found_grad}, {"out": expected, "d": expected_grad}, 2e-5)


def test_unaligned_memory_is_copied_not_misread() -> None:
    storage = torch.randn(1 + 2 * 30 * 33)
    q = storage[1:].view(1, 2, 30, 33)[..., :32]
    out = triton_attention(q, q, q, scale=0.2)
    expected = reference_attention(q, q, q, None, None, window=None, scale=0.2)
    assert_same({"out": out}, {"out": expected}, 2e-5)


def test_distances_forbidden_by_the_table_itself() -> None:
    inputs = inputs_of(Case(80, 80, 32))
    bias = inputs["bias"].detach().clone()
    bias[:, 3:50] = -math.inf
    inputs["bias"] = bias.requires_grad_()
    settings = {"window": None, "scale": 0.2}
    found = outputs_and_gradients(triton_attention, inputs, **settings)
    expected = outputs_and_gradients(reference_attention, in_double(inputs), **settings)
    assert_same(found, expected, 2e-5)


def steep(case: Case) -> dict[str, Tensor | None]:
    inputs = inputs_of(case)
    slopes = torch.tensor([[4.0], [0.5]])
    inputs["bias"] = (-slopes * torch.arange(case.k_length)).requires_grad_()
    return inputs


def test_pruning_tiles_that_have_decayed_changes_nothing() -> None:
    inputs = steep(Case(120, 120, 32))
    visible = torch.tensor([12, 100])
    plain = outputs_and_gradients(triton_attention, inputs, scale=0.2)
    pruned = outputs_and_gradients(triton_attention, inputs, scale=0.2, visible=visible)
    assert_same(pruned, plain, 1e-6)


def test_pruning_really_leaves_tiles_out() -> None:
    inputs = inputs_of(Case(120, 120, 32))
    plain = triton_attention(**inputs, scale=0.2)
    pruned = triton_attention(**inputs, scale=0.2, visible=torch.tensor([1, 120]))
    assert torch.equal(pruned[:, 1], plain[:, 1])
    assert not torch.allclose(pruned[:, 0, -1], plain[:, 0, -1], atol=1e-3)


def test_only_the_gradients_that_are_asked_for() -> None:
    inputs = inputs_of(Case(40, 40, 32, weight=True))
    inputs["weight"] = inputs["weight"].detach()
    out = triton_attention(**inputs, scale=0.2)
    out.sum().backward()
    assert inputs["weight"].grad is None
    assert inputs["bias"].grad.abs().sum() > 0
    assert torch.equal(inputs["bias"].grad[:, 40:], torch.zeros(2, 7))


def test_reasons_not_to_run() -> None:
    q = torch.zeros(1, 1, 4, 32)
    assert can_run(q, q, q) is None
    assert "dropout=0.1" in (can_run(q, q, q, dropout=0.1) or "")
    assert "float64" in (can_run(q.double(), q.double(), q.double()) or "")
    assert "bf16" in (can_run(q.bfloat16(), q.bfloat16(), q.bfloat16()) or "")
    for wide in (torch.zeros(1, 1, 4, 256), torch.zeros(1, 1, 4, 256).half()):
        assert can_run(wide, wide, wide) is None
    for wider in (torch.zeros(1, 1, 4, 257), torch.zeros(1, 1, 4, 257).half()):
        assert "257" in (can_run(wider, wider, wider) or "")
    with pytest.raises(EngineError, match="positive scale"):
        triton_attention(q, q, q, scale=0.0)
    with pytest.raises(EngineError, match="visible"):
        triton_attention(q, q, q, scale=1.0, visible=torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("q_length", "k_length", "q_offset", "window", "tables"),
    [
        (9, 9, 0, None, "bias"),
        (3, 150, 147, 60, "both"),
        (8, 19, 3, None, "weight"),
        (7, 7, 0, 5, "none"),
    ],
)
def test_fused_softmax_matches_the_dense_formula(
    q_length: int, k_length: int, q_offset: int, window: int | None, tables: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    bias = -3 * torch.rand(2, k_length + 3)
    weight = 0.2 + torch.rand(2, k_length + 3)
    inputs = {
        "scores": torch.randn(2, 2, q_length, k_length).to(dtype).requires_grad_(),
        "bias": bias.requires_grad_() if tables in ("bias", "both") else None,
        "weight": weight.requires_grad_() if tables in ("weight", "both") else None,
    }
    settings = {"scale": 0.5, "window": window, "q_offset": q_offset}
    found = outputs_and_gradients(triton_fused_softmax, inputs, **settings)
    expected = outputs_and_gradients(reference_softmax, in_double(inputs), **settings)
    assert found["out"].dtype == dtype
    assert_same(found, expected, 2e-5 if dtype == torch.float32 else 4e-3)


def test_fused_softmax_beyond_one_block_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.engines import triton_softmax

    monkeypatch.setattr(triton_softmax, "_MAX_BLOCK", 16)
    inputs = {"scores": torch.randn(1, 2, 4, 70, requires_grad=True), "bias": -torch.rand(2, 70)}
    inputs["bias"].requires_grad_()
    settings = {"scale": 0.5, "window": 40, "q_offset": 66}
    found = outputs_and_gradients(triton_fused_softmax, inputs, **settings)
    expected = outputs_and_gradients(
        lambda scores, bias, **rest: reference_softmax(scores, bias, None, **rest),
        in_double(inputs),
        **settings,
    )
    assert_same(found, expected, 2e-5)
    again = outputs_and_gradients(triton_fused_softmax, inputs, **settings)
    assert all(torch.equal(x, again[name]) for name, x in found.items())


def test_fused_softmax_reasons_not_to_run() -> None:
    assert can_run_softmax(torch.zeros(1, 1, 2, 2)) is None
    assert "float64" in (can_run_softmax(torch.zeros(1, 1, 2, 2).double()) or "")
