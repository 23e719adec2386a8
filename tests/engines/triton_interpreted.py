"""Tests of the Triton attention kernels in Triton's interpreter, on CPU.

TRITON_INTERPRET=1 must be set before Triton is imported, so test_triton_attention.py runs this
file in a process of its own; its name keeps it out of the ordinary collection. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/engines/triton_interpreted.py
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.engines import attention, triton_launch
from megatron.engines.call import checked_call
from megatron.engines.triton_attention import can_run
from megatron.engines.triton_features import in_dtype
from megatron.engines.triton_runtime import Launch, interpreted, jit, tl
from megatron.engines.triton_tiles import Tiles, tiles_of
from tests.engines.reference import reference_attention
from tests.engines.triton_cases import (
    Case,
    Inputs,
    assert_same,
    dropout_of,
    in_double,
    inputs_of,
    kept_weights,
    outputs_and_gradients,
    run_triton,
)

assert interpreted(), "set TRITON_INTERPRET=1"
# scores of the future may overflow before they are masked
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def check_inputs(inputs: Inputs, tolerance: float, **settings: object) -> dict[str, Tensor]:
    return check_pair(inputs, tolerance, settings, settings)


def check_pair(
    inputs: Inputs, tolerance: float, ours: dict[str, Any], dense: dict[str, Any]
) -> dict[str, Tensor]:
    """Settings of the engine's call, and of the dense formula."""
    found = outputs_and_gradients(run_triton, inputs, **ours)
    expected = outputs_and_gradients(reference_attention, in_double(inputs), **dense)
    assert_same(found, expected, tolerance)
    return found


def check(case: Case, tolerance: float, scale: float | None = None) -> None:
    scale = case.head_dim**-0.5 if scale is None else scale
    settings = {"window": case.window, "scale": scale}
    ours, dense = settings | dropout_of(case), settings | kept_weights(case)
    found = check_pair(inputs_of(case), tolerance, ours, dense)
    assert found["out"].dtype == case.dtype


CASES = [
    Case(70, 70, 64),
    Case(64, 64, 32, bias=False),
    Case(150, 150, 32, heads=1),  # several tiles in every direction
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
    Case(35, 52, 256, window=30, weight=True, heads=1),
    Case(18, 41, 200, bias=False, window=25, heads=1),
    Case(1, 40, 256, weight=True, heads=1, features=(3, 20)),
    # grouped heads
    Case(60, 60, 32, heads=4, key_heads=2),
    Case(33, 70, 32, heads=3, key_heads=1, bias=False, batch=2),
    # key bias, documents, sinks, and all of it
    Case(80, 80, 32, key_bias="small"),
    Case(80, 80, 32, key_bias="gate", bias=False),
    Case(70, 101, 32, key_bias="pad", weight=True),
    Case(60, 140, 32, documents=23, batch=2, heads=1),
    Case(50, 90, 32, documents=31, bias=False, window=20, heads=1),
    Case(60, 60, 32, sink="head"),
    Case(60, 60, 32, sink="row", bias=False, batch=2, heads=1),
    Case(60, 60, 32, sink="head", key_bias="pad", heads=1),
    Case(
        71, 118, 64, window=50, weight=True, batch=2, heads=4, key_heads=2, key_bias="gate",
        documents=37, sink="row",
    ),
    Case(40, 75, 256, heads=2, key_heads=1, key_bias="small", documents=30, sink="head"),
    # query features and row scales
    Case(70, 90, 32, heads=2, key_heads=1, features=(5, 30)),
    Case(40, 60, 32, batch=2, bias=False, features=(17, 99), shared_features=True, window=33),
    Case(70, 90, 32, batch=2, weight=True, features=(5, 30), key_bias="small", row_scale="head"),
    Case(
        50, 90, 32, heads=1, key_bias="gate", documents=31, sink="row", features=(3, 20),
        row_scale="row",
    ),
    Case(50, 70, 32, heads=1, weight=True, key_bias="pad", sink="head", row_scale="head"),
    # attention dropout
    Case(70, 90, 32, key_heads=1, batch=2, dropout=0.2),
    Case(40, 60, 32, heads=1, weight=True, row_scale="row", dropout=0.4),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_every_gradient_match_the_dense_formula(case: Case) -> None:
    check(case, tolerance=2e-5)


def test_dropout_drops_the_keys_that_the_dense_engine_drops() -> None:
    """With equal scores and the identity as values, the output is the mask; also of 17 queries."""
    keys = 64
    q, k = torch.zeros(2, 2, keys, keys), torch.zeros(2, 1, keys, keys)
    v = torch.eye(keys).expand(2, 1, keys, keys)
    for queries in (keys, 17):
        dense, ours = (
            attention(q[:, :, -queries:], k, v, dropout=0.25, seed=11, engine=engine)
            for engine in ("naive", "triton")
        )
        assert torch.equal(ours > 0, dense > 0)
        assert 0 < (ours == 0).tril().sum() < ours.numel()


@pytest.mark.parametrize(
    "case",
    [
        Case(70, 70, 64),
        Case(65, 90, 96, weight=True, window=50),
        Case(70, 70, 32, key_bias="gate", documents=33, sink="head", heads=4, key_heads=2),
        Case(20, 36, 256, heads=1, weight=True, window=30),
        Case(50, 70, 32, heads=1, features=(5, 30)),
    ],
    ids=str,
)
def test_half_precision_rounds_but_agrees(case: Case) -> None:
    check(replace(case, dtype=torch.float16), tolerance=4e-3)


def test_inputs_that_are_bf16_numbers() -> None:
    """The interpreter has no bf16 products: fp32 ones of bf16 numbers are exact all the same."""
    check(Case(70, 70, 64, key_bias="small", sink="head", rounded_to=torch.bfloat16), 2e-5)


@pytest.mark.parametrize(
    "case",
    [
        Case(300, 300, 64, heads=1),
        Case(280, 411, 128, heads=1, window=150, weight=True),
        Case(
            261, 390, 64, heads=2, key_heads=1, batch=2, bias=False,
            key_bias="gate", documents=110, sink="row",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_the_tiles_of_half_precision_in_exact_arithmetic(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half_tiles(kernel: str, block_d: int, _: torch.dtype, *others: Any) -> Tiles:
        return tiles_of(kernel, block_d, torch.bfloat16, *others)

    monkeypatch.setattr(triton_launch, "tiles_of", half_tiles)
    check(case, tolerance=2e-5)


@pytest.mark.parametrize("pruning", [False, True])
def test_the_attention_function_with_every_operand_at_once(pruning: bool) -> None:
    """Tables, gates of 1e4, documents, sinks, grouped heads, window, cached keys, uneven sizes."""
    case = Case(
        41, 303, 32, weight=True, batch=2, key_heads=1, key_bias="gate", documents=71, sink="row"
    )
    inputs = steep(case)
    settings = {"window": 293, "scale": 0.21}
    found = outputs_and_gradients(attention, inputs, engine="triton", pruning=pruning, **settings)
    expected = outputs_and_gradients(reference_attention, in_double(inputs), **settings)
    assert found.keys() == {"out", "dq", "dk", "dv", "dbias", "dweight", "dkey_bias", "dsink"}
    assert_same(found, expected, 2e-5)


@pytest.mark.parametrize("scale", [0.7, -0.3])
def test_scale_is_applied_to_scores_and_gradients(scale: float) -> None:
    check(Case(40, 40, 32, weight=True, heads=1), tolerance=5e-5, scale=scale)
    check(Case(40, 40, 32, heads=1), tolerance=5e-5, scale=scale)


@pytest.mark.parametrize("case", [Case(140, 140, 32, batch=2), Case(40, 40, 256)], ids=str)
def test_two_runs_agree_bit_for_bit(case: Case) -> None:
    case = replace(case, weight=True, heads=2, key_heads=1, key_bias="small", sink="row")
    first, second = (
        outputs_and_gradients(run_triton, inputs_of(case), window=50, scale=0.2) for _ in range(2)
    )
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


def test_a_sequence_of_documents_is_its_documents() -> None:
    case = Case(96, 96, 32, documents=32, key_bias="small")
    inputs = inputs_of(case)
    together = run_triton(**inputs, scale=0.2)
    for start in (0, 32, 64):
        part = slice(start, start + 32)
        q, k, v = (inputs[name][:, :, part] for name in "qkv")
        alone = run_triton(
            q, k, v, inputs["bias"], key_bias=inputs["key_bias"][..., part], scale=0.2
        )
        assert_same({"out": together[:, :, part]}, {"out": alone}, 2e-6)


def test_pads_alone_give_zeros_and_no_gradient() -> None:
    inputs = inputs_of(Case(40, 40, 32, key_bias="pad"))
    found = outputs_and_gradients(run_triton, inputs, scale=0.2)
    blind = 40 // 3
    assert torch.equal(found["out"][:, :, :blind], torch.zeros(1, 2, blind, 32))
    assert torch.equal(found["dq"][:, :, :blind], torch.zeros(1, 2, blind, 32))
    assert torch.equal(found["dkey_bias"][..., :blind], torch.zeros(1, 1, blind))
    assert all(x.isfinite().all() for x in found.values())


def test_views_of_a_fused_projection_need_no_layout_of_their_own() -> None:
    torch.manual_seed(0)
    length, heads, dim = 40, 3, 32
    fused = torch.randn(2, length, heads, 3 * dim, requires_grad=True)
    q, k, v = (x.transpose(1, 2) for x in fused.chunk(3, dim=-1))
    assert not q.is_contiguous()
    bias = -torch.rand(heads, length)
    out = run_triton(q, k, v, bias, scale=0.3)
    expected = reference_attention(q, k, v, bias, scale=0.3)
    (found_grad,) = torch.autograd.grad(out.square().sum(), fused)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), fused)
    assert_same({"out": out, "d": found_grad}, {"out": expected, "d": expected_grad}, 2e-5)


def test_unaligned_memory_is_copied_not_misread() -> None:
    storage = torch.randn(1 + 2 * 30 * 33)
    q = storage[1:].view(1, 2, 30, 33)[..., :32]
    out = run_triton(q, q, q, scale=0.2)
    assert_same({"out": out}, {"out": reference_attention(q, q, q, scale=0.2)}, 2e-5)


def test_distances_forbidden_by_the_table_itself() -> None:
    inputs = inputs_of(Case(80, 80, 32))
    bias = inputs["bias"].detach().clone()
    bias[:, 3:50] = -math.inf
    inputs["bias"] = bias.requires_grad_()
    check_inputs(inputs, 2e-5, scale=0.2)


@pytest.mark.parametrize("slope", [1.0, 4.0, 40.0])
def test_bands_in_which_the_table_falls_far(slope: float) -> None:
    """Two launches share the bands: gentle ones factor the bias out, steep ones cannot."""
    inputs = inputs_of(Case(150, 150, 32, heads=2))
    slopes = torch.tensor([[slope], [0.01]])
    inputs["bias"] = (-slopes * torch.arange(150)).requires_grad_()
    check_inputs(inputs, 2e-5, scale=0.2)


def test_nan_in_a_table_is_not_hidden() -> None:
    inputs = inputs_of(Case(20, 20, 32, heads=1))
    with torch.no_grad():
        inputs["bias"][0, 3] = math.nan
    assert run_triton(**inputs, scale=0.2)[0, 0, 3:].isnan().all()


def steep(case: Case) -> Inputs:
    inputs = inputs_of(case)
    slopes = torch.tensor([[4.0], [0.5]])
    inputs["bias"] = (-slopes * torch.arange(case.k_length)).requires_grad_()
    return inputs


def test_pruning_tiles_that_have_decayed_changes_nothing() -> None:
    inputs = steep(Case(150, 150, 32))
    visible = torch.tensor([12, 140])
    plain = outputs_and_gradients(run_triton, inputs, scale=0.2)
    pruned = outputs_and_gradients(run_triton, inputs, scale=0.2, visible=visible)
    assert_same(pruned, plain, 1e-6)


def test_pruning_really_leaves_tiles_out() -> None:
    inputs = inputs_of(Case(150, 150, 32))
    plain = outputs_and_gradients(run_triton, inputs, scale=0.2)
    visible = torch.tensor([1, 150])
    pruned = outputs_and_gradients(run_triton, inputs, scale=0.2, visible=visible)
    for name, axis in (("out", 1), ("dq", 1), ("dk", 1), ("dbias", 0)):
        first, second = plain[name].select(axis, 0), plain[name].select(axis, 1)
        assert torch.equal(pruned[name].select(axis, 1), second), name
        assert not torch.allclose(pruned[name].select(axis, 0), first, atol=1e-3), name


def test_only_the_gradients_that_are_asked_for() -> None:
    inputs = inputs_of(Case(40, 40, 32, weight=True, key_bias="small", sink="head"))
    for name in ("weight", "key_bias", "q"):
        inputs[name] = inputs[name].detach()
    run_triton(**inputs, scale=0.2).sum().backward()
    assert inputs["weight"].grad is None
    assert inputs["key_bias"].grad is None
    assert inputs["bias"].grad.abs().sum() > 0
    assert inputs["sink"].grad.abs().sum() > 0
    assert torch.equal(inputs["bias"].grad[:, 40:], torch.zeros(2, 7))


@jit()
def copy_bits_kernel(source_ptr, target_ptr, COUNT: tl.constexpr):
    places = tl.arange(0, COUNT)
    pointers = in_dtype(target_ptr, source_ptr.dtype.element_ty)
    tl.store(pointers + places, tl.load(source_ptr + places))


@pytest.mark.parametrize("dtype", [torch.int16, torch.float16])
def test_strips_take_numbers_of_another_dtype_bit_for_bit(dtype: torch.dtype) -> None:
    """As dQ writes bf16 gradients to strips of fp16, which the interpreter cannot."""
    source = torch.arange(-8, 8, dtype=dtype)
    strip = torch.zeros(16, dtype=torch.float16)
    Launch(copy_bits_kernel, (1,), (source, strip), {"COUNT": 16}).run()
    assert torch.equal(strip.view(dtype), source)


def test_reasons_not_to_run() -> None:
    def reason(x: Tensor, **options: float) -> str:
        return can_run(checked_call(x, x, x, **options)) or ""

    q = torch.zeros(1, 1, 4, 32)
    assert reason(q) == ""
    assert reason(q, dropout=0.1) == ""
    assert "float64" in reason(q.double())
    assert "bf16" in reason(q.bfloat16())
    for dtype in (torch.float32, torch.float16):
        assert reason(torch.zeros(1, 1, 4, 256, dtype=dtype)) == ""
        assert "257" in reason(torch.zeros(1, 1, 4, 257, dtype=dtype))
