"""Runs triton_interpreted_pruning.py: what the Triton engine leaves out."""

from __future__ import annotations

import pytest
import torch

from megatron.engines import triton_pruning
from megatron.engines.call import checked_call
from megatron.engines.triton_runtime import unavailable
from tests.engines.triton_cases import check_in_interpreter


def test_nothing_is_pruned_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(triton_pruning, "can_decay", lambda bias, reach: looked.append(reach))
    x = torch.zeros(1, 2, 512, 16)
    call = checked_call(x, x, x, -torch.arange(512.0).expand(2, -1))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert triton_pruning.visible_distances(call) is None and not looked
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert triton_pruning.visible_distances(call) is None and looked == [512]


@pytest.mark.skipif(unavailable() is not None, reason="Triton is not installed")
def test_it_holds_in_tritons_interpreter() -> None:
    check_in_interpreter("triton_interpreted_pruning.py")
