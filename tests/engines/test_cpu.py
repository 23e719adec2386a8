"""`torch.compile` takes attention without breaking the graph, and the numbers stay the same."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from kerple import attention
from tests.engines.test_call import EVERY_TERM, Draw


@pytest.fixture(autouse=True)
def _forget_graphs() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("engine", ["tiled", "naive"])
@pytest.mark.parametrize(
    ("tables", "terms"),
    [("bias", "key_bias+first_key+sink"), ("bias+weight", EVERY_TERM)],
)
def test_one_graph_with_every_term(engine: str, tables: str, terms: str) -> None:
    attend = torch.compile(partial(attention, engine=engine), fullgraph=True, backend="aot_eager")
    # 24: no whole vectors
    draw = Draw(heads=4, dim=24, tables=tables, terms=terms, q_len=70, k_len=90)
    draw.check(lambda **arguments: attend(**arguments), 4e-6)


def test_bf16_and_only_some_gradients() -> None:
    attend = torch.compile(attention, fullgraph=True, backend="aot_eager")
    draw = Draw(heads=4, terms="key_bias", dtype=torch.bfloat16, q_len=70, k_len=90)
    draw.arguments["k"] = draw.arguments["k"].detach()
    draw.arguments["bias"] = draw.arguments["bias"].detach()
    draw.check(lambda **arguments: attend(**arguments), 2e-2)


class Block(nn.Module):
    """Attention between two projections, as in anybody's model."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.slopes = nn.Parameter(torch.rand(2, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4).unbind()
        bias = -self.slopes * torch.arange(x.shape[1])
        return self.out(attention(q, k, v, bias).transpose(1, 2).flatten(2))


@pytest.mark.slow
def test_a_block_through_the_inductor_learns_the_same() -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, 60, 32)
    compiled = torch.compile(block, fullgraph=True)
    results = []
    for model in (block, compiled):
        out = model(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), list(block.parameters()))])
    for eager, other in zip(*results, strict=True):
        torch.testing.assert_close(other, eager, rtol=1e-4, atol=1e-5)
