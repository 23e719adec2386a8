"""What the kernels are handed; whether they read it rightly is asked in triton_interpreted.py."""

from __future__ import annotations

import torch

from megatron.engines.triton_problem import ALIGNMENT, aligned


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
        copy = aligned(x)
        assert torch.equal(copy, x)
        assert copy.is_contiguous() and copy.data_ptr() % ALIGNMENT == 0
