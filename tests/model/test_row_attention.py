"""FIRE: its bias against a dense one written out by hand, on both sides of its threshold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.model import row_attention
from megatron.model.content_positions import Fire, RowBias
from megatron.model.gpt import GPTModel
from megatron.model.row_attention import attention_by_rows
from tests.model.position_helpers import options, wave
from tests.model.small_spec import SPEC

HEADS, LENGTH, HEAD_DIM, THRESHOLD = 3, 40, 8, 9.5


def row_bias(threshold: float = THRESHOLD) -> RowBias:
    torch.manual_seed(0)
    scalars = (torch.tensor(x, dtype=torch.float64) for x in (0.3, threshold))
    shapes = ((32,), (32,), (HEADS, 32), (HEADS,))
    numbers = (*scalars, *(torch.randn(shape, dtype=torch.float64) for shape in shapes))
    return RowBias(*(number.requires_grad_() for number in numbers))


def naive_bias(rows: RowBias, positions: Tensor) -> Tensor:
    """The paper's formula for every pair, as its listing: [B, H, L, L]."""
    place = torch.arange(positions.shape[1])
    distance = (place[:, None] - place).clamp(min=0)
    normalizer = torch.maximum(positions.double(), rows.threshold)[..., None]
    psi = torch.log(rows.c * distance + 1), torch.log(rows.c * normalizer + 1)
    hidden = torch.relu(
        (psi[0] / (psi[1] + 1e-6))[..., None] * rows.hidden_weight + rows.hidden_bias
    )
    by_head = torch.einsum("bmnk,hk->bhmn", hidden, rows.head_weight)
    return by_head + rows.head_bias[:, None, None]


def naive_attention(rows: RowBias, positions: Tensor, q: Tensor, k: Tensor, v: Tensor,
                    terms: dict[str, Any]) -> Tensor:  # fmt: skip
    place = torch.arange(LENGTH)
    distance = place[:, None] - place
    scores = q @ k.transpose(-1, -2) / HEAD_DIM**0.5 + naive_bias(rows, positions)
    if "key_bias" in terms:
        scores = scores + terms["key_bias"][:, :, None]
    if "row_scale" in terms:
        scores = scores * terms["row_scale"][..., None]
    hidden = (distance < 0) | (distance >= terms.get("window", LENGTH))
    if "first_key" in terms:
        hidden = hidden | (place < terms["first_key"][:, None, :, None])
    scores = scores.masked_fill(hidden, -torch.inf)
    if "sink" in terms:
        column = terms["sink"][:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    return scores.softmax(-1)[..., :LENGTH] @ v


STARTS = torch.tensor([[0] * 25 + [25] * 15, [0] * LENGTH])
TERMS: dict[str, dict[str, Any]] = {
    "alone": {},
    "window": {"window": 11},
    "sink and keys": {
        "sink": torch.tensor([0.5, -1.0, 2.0]).double(),
        "key_bias": torch.linspace(-2, 1, 2 * HEADS * LENGTH).double().view(2, HEADS, LENGTH),
    },
    "documents": {"first_key": STARTS, "row_scale": torch.full((1, 1, LENGTH), 1.3).double()},
}


@pytest.mark.parametrize("threshold", [3.5, THRESHOLD, 100.0])
@pytest.mark.parametrize("terms", TERMS)
def test_outputs_and_all_gradients_equal_a_dense_twin(
    terms: str, threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_attention, "LARGEST_BLOCK", 7 * 64 * LENGTH)  # several blocks
    rows, place = row_bias(threshold), torch.arange(LENGTH)
    positions = place - STARTS if terms == "documents" else place[None]
    shape = (2, HEADS, LENGTH, HEAD_DIM)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    out = attention_by_rows(rows, positions, *inputs, engine="naive", **TERMS[terms])
    expected = naive_attention(rows, positions, *inputs, TERMS[terms])
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    leaves = [*inputs, *rows]
    ours = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)
    theirs = torch.autograd.grad(expected.square().sum(), leaves, allow_unused=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


# What the FIRE classes of mcleish7/arithmetic (commit 86022a5) and of the DAPE authors'
# chuanyang-Zheng/DAPE (bde344a) computed in float64 from the numbers below; they agree to 7e-7.
# Heads 0 and 1 at some pairs (m, n) of 12 positions, on both sides of L = 6; the gradients of
# (bias * wave).sum(): of c, of L, and those of the network times waves, summed.
PAIRS = ((0, 4, 6, 7, 11, 11), (0, 1, 0, 7, 0, 9))
RECORDED = (
    (1.106914, -1.081541, -2.592391, 1.106914, -2.592392, 0.023124),
    (-0.823880, 3.211219, 5.797586, -0.823880, 5.797588, 1.233040),
)
RECORDED_GRADIENTS = (0.95967, 0.139043, -1.911701, -3.234311, -0.748021, -0.630160)


def test_bias_and_gradients_are_those_of_two_other_implementations() -> None:
    network = (wave(32), 0.2 * wave(32, start=1), wave(2, 32, start=2), wave(2, start=3))
    scalars = (torch.tensor(x, dtype=torch.float64) for x in (0.3, 6.0))
    rows = RowBias(*(number.requires_grad_() for number in (*scalars, *network)))
    place = torch.arange(12)
    bias = rows.dense(place[:, None] - place, place[None])[0]
    expected = torch.tensor(RECORDED, dtype=torch.float64)
    torch.testing.assert_close(bias[:, PAIRS[0], PAIRS[1]], expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(rows.table(12)[:, :7].T, bias[:, 6, :7].flip(-1).T)
    loss = (bias * wave(2, 12, 12, start=4)).tril().sum()
    found = torch.autograd.grad(loss, list(rows))
    sums = [*found[:2], *((g * wave(*g.shape, start=5)).sum() for g in found[2:])]
    wanted = torch.tensor(RECORDED_GRADIENTS, dtype=torch.float64)
    torch.testing.assert_close(torch.stack(sums), wanted, rtol=1e-5, atol=2e-6)


def test_it_starts_as_the_authors_listing() -> None:
    fire = Fire(options(heads=4, head_dim=8))
    numbers = fire.row_bias()
    assert numbers.c.item() == pytest.approx(0.1) and numbers.threshold.item() == 512
    assert (
        numbers.head_weight.shape == (4, 32) and numbers.head_weight.abs().max().item() <= 32**-0.5
    )
    assert numbers.hidden_weight.abs().max().item() <= 1
    near, far = numbers.table(100), numbers.table(100, position=2000)
    torch.testing.assert_close(near, numbers.table(100, position=511))
    assert not torch.allclose(near, far)


def test_ranks_hold_the_heads_of_the_whole() -> None:
    whole = Fire(options(heads=4, head_dim=8)).row_bias()
    parts = [Fire(options(heads=4, head_dim=8, tp_rank=i, tp_size=2)).row_bias() for i in (0, 1)]
    assert torch.equal(torch.cat([part.head_weight for part in parts]), whole.head_weight)
    assert all(torch.equal(part.hidden_weight, whole.hidden_weight) for part in parts)


def test_a_model_has_one_bias_in_every_engine_and_beyond_its_threshold() -> None:
    spec = SPEC.replace(pos_emb="fire", fire_threshold=6)
    text = torch.arange(20)[None] % 7
    by_engine = [GPTModel(spec.replace(attention_engine=e))(text) for e in ("naive", "tiled")]
    torch.testing.assert_close(*by_engine, rtol=1e-4, atol=1e-5)
    later = GPTModel(spec.replace(fire_threshold=60))(text)
    torch.testing.assert_close(by_engine[0][:, 0], later[:, 0])
    assert not torch.allclose(by_engine[0], later)
