"""One layer, and what travels from layer to layer."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from megatron.model import GPTModel
from megatron.model.position_base import Tables
from megatron.model.position_names import kernel
from megatron.model.transformer import PositionTables, pack, unpack
from tests.model.small_spec import SPEC


def test_what_travels_comes_out_as_it_went_in() -> None:
    hidden, starts = torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.int64)
    names = ("bias", "weight")
    for with_starts, *with_tables in product((False, True), repeat=3):
        present = {
            n: torch.randn(3, 5) for n, there in zip(names, with_tables, strict=True) if there
        }
        sent = (hidden, starts if with_starts else None, Tables(**present))
        assert unpack(pack(*sent), tuple(present)) == sent


@pytest.mark.parametrize("name", ["alibi", "kerple_bias_wht"])
def test_a_pipeline_may_send_a_gradient_back_for_every_table(name: str) -> None:
    """DeepSpeed does so also for tables that nobody learns; learned ones keep their way home."""
    owner = PositionTables(kernel(name, heads=3), pipelined=True)
    _, *tables = owner(torch.randn(2, 7, 8))
    assert tables and all(table.requires_grad and table.is_contiguous() for table in tables)
    torch.autograd.backward(tables, [torch.ones_like(table) for table in tables])
    assert all(parameter.grad is not None for parameter in owner.parameters())


@pytest.mark.parametrize(
    "change", [{}, {"gpt_j_residual": True}, {"gpt_j_residual": True, "gpt_j_tied": True}], ids=str
)
def test_the_branches_come_one_after_the_other_or_side_by_side(change: dict[str, bool]) -> None:
    layer = GPTModel(SPEC.replace(pos_emb="none", init_method_std=0.3, **change)).layers[0]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    x = torch.randn(2, 9, 32)

    def attended(y: Tensor) -> Tensor:
        return layer.attention(layer.input_layernorm(y), Tables())

    if change.get("gpt_j_tied"):
        expected = x + attended(x) + layer.mlp(layer.input_layernorm(x))
    elif change:
        expected = x + attended(x) + layer.mlp(layer.post_attention_layernorm(x))
    else:
        y = x + attended(x)
        expected = y + layer.mlp(layer.post_attention_layernorm(y))
    torch.testing.assert_close(layer(x), expected)
