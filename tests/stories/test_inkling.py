"""Our attention from its factors against transformers' own Inkling attention, which is dense."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megatron.engines import attention

inkling = pytest.importorskip("transformers.models.inkling.modeling_inkling")

HEADS, KEY_HEADS, DIM, RANK = 4, 2, 16, 6


class Group(nn.Module):
    """What transformers' function asks of its layer."""

    num_key_value_groups = HEADS // KEY_HEADS
    training = False


def temperature(positions: Tensor, floor: int, alpha: float = 0.1) -> Tensor:
    return 1.0 + alpha * torch.log(((positions + 1).float() / floor).clamp(min=1.0))


@pytest.mark.parametrize("engine", ["naive", "tiled"])
@pytest.mark.parametrize(
    ("queries", "keys", "extent", "window", "floor"),
    [(150, 150, 40, None, 30), (64, 200, 100, None, 16), (120, 120, 50, 50, None)],
)
def test_outputs_and_gradients_are_those_of_transformers(
    engine: str, queries: int, keys: int, extent: int, window: int | None, floor: int | None
) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, HEADS, queries, DIM, requires_grad=True)
    k, v = (torch.randn(2, KEY_HEADS, keys, DIM, requires_grad=True) for _ in "kv")
    states = torch.randn(2, queries, HEADS, RANK, requires_grad=True)
    logits = inkling.InklingRelativeLogits(RANK, extent)
    nn.init.normal_(logits.proj)
    positions = torch.arange(keys - queries, keys)
    tau = torch.ones(queries) if floor is None else temperature(positions, floor)

    bias = logits(states, positions, torch.arange(keys)) * tau.view(1, 1, -1, 1)
    distance = positions[:, None] - torch.arange(keys)
    hidden = (distance < 0) | (distance >= (window or keys))
    mask = torch.zeros(queries, keys).masked_fill(hidden, -torch.inf)
    theirs, _ = inkling.eager_attention_forward(
        Group(), q * tau.view(1, 1, -1, 1), k, v, mask, scaling=1 / DIM, position_bias=bias
    )
    ours = attention(
        *(q, k, v),
        query_features=states.transpose(1, 2),
        distance_features=logits.proj[None],
        row_scale=None if floor is None else tau.view(1, 1, -1),
        window=window,
        scale=1 / DIM,
        engine=engine,
    ).transpose(1, 2)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    wanted = [q, k, v, states, logits.proj]
    grad = torch.randn_like(theirs)
    expected = torch.autograd.grad(theirs, wanted, grad)
    for actual, other in zip(torch.autograd.grad(ours, wanted, grad), expected, strict=True):
        torch.testing.assert_close(actual, other, rtol=1e-4, atol=2e-5)
