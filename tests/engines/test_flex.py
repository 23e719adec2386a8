"""FlexAttention as an engine: every operand, on CPU, against the plain formula in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from megatron.engines import attention, flex
from megatron.engines.call import checked_call
from megatron.errors import EngineError
from tests.engines.reference import reference_attention
from tests.engines.triton_cases import (
    Case,
    Inputs,
    assert_same,
    in_double,
    inputs_of,
    outputs_and_gradients,
)

CASES = {
    "plain": Case(130, 130, 16, bias=False),
    "bias, offset": Case(130, 300, 16),
    "weight, grouped heads, window": Case(70, 200, 16, 40, weight=True, key_heads=1),
    "gates": Case(150, 200, 16, key_bias="gate", batch=2),
    "padding": Case(200, 200, 16, key_bias="pad", batch=2),
    "documents": Case(150, 290, 16, documents=37, batch=2),
    "sink per head": Case(50, 60, 16, sink="head"),
    "all": Case(150, 190, 16, 60, weight=True, batch=2, key_bias="small", documents=50, sink="row"),
    "one query": Case(1, 150, 16),
    "features": Case(70, 150, 16, features=(3, 40), shared_features=True),
    "features and all": Case(
        70,
        90,
        16,
        60,
        batch=2,
        key_bias="small",
        documents=50,
        sink="row",
        features=(2, 99),
        row_scale="head",
    ),
}
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def run_flex(q: Tensor, k: Tensor, v: Tensor, **terms: Tensor | int | None) -> Tensor:
    return attention(q, k, v, engine="flex", **terms)


@pytest.mark.parametrize("name", CASES)
def test_every_operand_gives_the_formulas_numbers(name: str) -> None:
    case = CASES[name]
    inputs: Inputs = {n: x if x is None else x.detach() for n, x in inputs_of(case).items()}
    found = run_flex(**inputs, window=case.window)
    expected = reference_attention(**in_double(inputs), window=case.window)
    assert_same({"out": found}, {"out": expected.detach()}, 2e-6)


@pytest.mark.parametrize("name", ["all", "padding", "weight, grouped heads, window"])
def test_its_formula_has_every_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses gradients on CPU for want of a kernel; its dense formula has them."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "_CPU_GRADIENTS", None)
    case = CASES[name]
    inputs, window = inputs_of(case), case.window
    found = outputs_and_gradients(run_flex, inputs, window=window)
    expected = outputs_and_gradients(reference_attention, in_double(inputs), window=window)
    assert_same(found, expected, 2e-5)


def test_a_block_of_the_mask_is_listed_if_a_query_of_it_sees_a_key_of_it() -> None:
    case = replace(CASES["documents"], q_length=700, k_length=700, documents=550)
    inputs: Inputs = {n: x if x is None else x.detach() for n, x in inputs_of(case).items()}
    call = checked_call(*(inputs[n] for n in ("q", "k", "v")), first_key=inputs["first_key"])
    mask = flex._block_mask(replace(call, window=400))
    b, h = torch.arange(2)[:, None, None], torch.tensor(0)
    i, j = torch.arange(700)[:, None], torch.arange(700)
    seen = torch.nn.functional.pad(mask.mask_mod(b, h, i, j), (0, 68, 0, 68))
    blocks = seen.view(2, 6, 128, 6, 128).transpose(2, 3).flatten(3)
    assert torch.equal(mask.to_dense()[:, 0].bool(), blocks.any(3))
    whole = blocks.all(3).sum(2)[:, :5]  # the last row of blocks is cut
    assert torch.equal(mask.full_kv_num_blocks[:, 0, :5].long(), whole) and whole.max() > 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dropout": 0.1}, "no attention dropout"),
        ({"gradients": True}, "gradients on GPU only"),
        ({"device": "meta"}, "the tensors are on meta"),
    ],
)
def test_what_it_cannot_do_is_said(change: dict, says: str) -> None:
    x = torch.zeros(1, 1, 8, 16, device=change.get("device", "cpu"))
    x.requires_grad_("gradients" in change)
    with pytest.raises(EngineError, match=says):
        attention(x, x, x, engine="flex", dropout=change.get("dropout", 0.0))
