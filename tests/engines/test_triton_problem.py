"""What the kernels are handed; whether they read it rightly is asked in triton_interpreted.py."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.engines.call import checked_call
from megatron.engines.triton_problem import ALIGNMENT, aligned, build_problem


class _Copies(TorchDispatchMode):
    """Counts the operators that copy a tensor."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default)
        return func(*args, **(kwargs or {}))


def test_views_of_a_fused_projection_are_not_copied() -> None:
    fused = torch.randn(2, 40, 3, 96)
    for part in fused.chunk(3, dim=-1):
        x = part.transpose(1, 2)
        assert not x.is_contiguous()
        assert aligned(x) is x


def test_memory_that_vectors_cannot_read_is_copied() -> None:
    storage = torch.randn(1 + 2 * 30 * 33)
    whole = storage[1:].view(1, 2, 30, 33)
    for x in (whole[..., :32], whole[..., ::2], torch.randn(1, 2, 32, 30).transpose(2, 3)):
        with _Copies() as copies:
            copy = aligned(x)
        assert copies.count == 1
        assert torch.equal(copy, x)
        assert copy.is_contiguous() and copy.data_ptr() % ALIGNMENT == 0


def test_rows_are_hashed_for_a_dropout_only() -> None:
    x = torch.randn(1, 2, 40, 32)
    assert build_problem(checked_call(x, x, x), None).row_hashes is None
    dropped = build_problem(checked_call(x, x, x, dropout=0.1, seed=torch.tensor(5)), None)
    assert dropped.row_hashes is not None
    assert dropped.row_hashes.shape == (1, 2, 2, 128)
