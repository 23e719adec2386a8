"""The C++ engine alone; its numbers are compared in test_engines.py and test_call.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.engines.cpu import tiled_forward_with_count
from megatron.engines.cpu_compiled import _TASKS_PER_THREAD, _parts
from tests.engines.conftest import force
from tests.engines.test_call import Draw, gates


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    return force("compiled", monkeypatch)


def test_torchs_default_dtype_changes_nothing(compiled: Callable[..., Tensor]) -> None:
    """What C++ writes to is fp32; memory of a smaller type would be written beyond its end."""
    q, k, v, bias = (torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(4))

    def gradients() -> tuple[Tensor, ...]:
        out = compiled(q, k, v, bias=-bias[0, :, :, 0].abs())
        return torch.autograd.grad(out.square().sum(), (q, k, v, bias))

    expected = gradients()
    torch.set_default_dtype(torch.float64)
    try:
        torch.testing.assert_close(gradients(), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("compiled")
def test_gates_alone_prune_tiles() -> None:
    draw = Draw(batch=1, q_len=2000, k_len=2000, terms="none", tables="none")
    q, k, v = (draw.arguments[name] for name in "qkv")
    _, count = tiled_forward_with_count(q, k, v, key_bias=gates(1, 6, 2000, 1000.0))
    assert count.share < 0.5


@pytest.mark.parametrize("pairs", [1, 3, 16, 17])
def test_there_are_tasks_for_every_thread_and_few_more(pairs: int) -> None:
    parts = _parts(4, pairs, grouped=False)
    assert (parts - 1) * pairs < 4 * _TASKS_PER_THREAD <= parts * pairs
    assert _parts(1, pairs, grouped=False) == 1 <= _parts(4, pairs, grouped=True) <= parts
