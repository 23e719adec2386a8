"""Scores of the exported model; that they are ours is held by test_modeling_kerple.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoints.hf import scores_kerple
from tests.checkpoints.hf.exports import SCORE_TERMS, assert_same, both
from tests.checkpoints.small_models import logits_of, tokens


def test_sixteen_bit_keys_carry_gates_bit_for_bit() -> None:
    gates = -torch.rand(2, 4, 9, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        keys = torch.randn(2, 2, 9, 8).to(dtype)
        found, beside = scores_kerple.split_gates_from_keys(
            scores_kerple.append_gates_to_keys(keys, gates), 8
        )
        assert torch.equal(found, keys) and torch.equal(beside, gates)


@pytest.mark.parametrize("terms", [{}, SCORE_TERMS], ids=["tables", "score terms"])
def test_long_inputs_are_scored_in_blocks_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terms: dict[str, Any]
) -> None:
    model, exported = both(tmp_path, pos_emb="kerple_bias_wht", sliding_window_width=90, **terms)
    mask = torch.ones(2, 120, dtype=torch.long)
    mask[1, :11] = 0
    with torch.no_grad():
        whole = exported(tokens(120), attention_mask=mask).logits
    monkeypatch.setattr(scores_kerple, "LARGEST_SCORES", 2 * 4 * 120 * 7)
    with torch.no_grad():
        blocks = exported(tokens(120), attention_mask=mask).logits
    torch.testing.assert_close(blocks[0], whole[0])
    torch.testing.assert_close(blocks[1, 11:], whole[1, 11:])
    assert_same(logits_of(model, tokens(120)), logits_of(exported, tokens(120)))


def test_absolute_positions_leave_out_padding_on_the_left() -> None:
    x = torch.zeros(2, 3, 8)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert scores_kerple.absolute_positions(None, mask, 2, x).tolist() == [[0, 1, 2], [2, 3, 4]]
    given = torch.tensor([[7, 8, 9]])
    assert scores_kerple.absolute_positions(given, mask, 2, x) is given
    for whole in (None, torch.ones(2, 1, 3, 5)):  # a mask of four dimensions counts no padding
        assert scores_kerple.absolute_positions(None, whole, 2, x).tolist() == [[2, 3, 4]]


@pytest.mark.parametrize("window", [None, 2, 3])
@pytest.mark.parametrize("padded", [None, "keys", "rows"])
def test_the_keys_that_a_query_sees_are_those_of_the_mask(
    window: int | None, padded: str | None
) -> None:
    allowed = None
    if padded:
        allowed = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]).bool()[:, None, None]
        allowed = allowed if padded == "keys" else allowed.expand(-1, -1, 4, -1)
    scores = scores_kerple.Scores((None, None), 2, 4, 6, window, allowed, torch.device("cpu"))
    visible = scores.dense()[0] == 0
    expected = visible.sum(-1)[:, 0].clamp(min=1)
    assert scores.keys_seen().tolist() == expected.tolist()
    if padded is None:
        assert expected.tolist() == [[min(n, window or n) for n in (3, 4, 5, 6)]]
