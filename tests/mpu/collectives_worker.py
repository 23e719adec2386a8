"""Run in two processes by test_collectives.py: what each rank gets, and the gradients, by hand."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.mpu.collectives import (
    SequenceParallel,
    TensorParallel,
    copy_to_group,
    gather_from_group,
    heads_to_positions,
    positions_to_heads,
    reduce_from_group,
    scatter_to_group,
    vocab_parallel_cross_entropy,
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_collectives(tp: TensorParallel) -> None:
    x, grad = drawn(3, 8).requires_grad_(), drawn(3, 8, seed=1)

    def gradient(y: Tensor, weights: Tensor) -> Tensor:
        return torch.autograd.grad(y, x, weights)[0]

    same = copy_to_group(x, tp)
    torch.testing.assert_close(same, x)
    # each rank goes on with it in another way: the gradients 1 g and 2 g add up
    torch.testing.assert_close(gradient(same, (tp.rank + 1) * grad), 3 * grad)
    total = reduce_from_group((tp.rank + 1) * x, tp)
    torch.testing.assert_close(total, 3 * x)
    torch.testing.assert_close(gradient(total, grad), (tp.rank + 1) * grad)
    share = scatter_to_group(x, tp)
    torch.testing.assert_close(share, x[:, 4 * tp.rank : 4 * tp.rank + 4])
    whole = gather_from_group(2 * share, tp)
    torch.testing.assert_close(whole, 2 * x)
    torch.testing.assert_close(gradient(whole, grad), 2 * grad)


def check_cross_entropy(tp: TensorParallel) -> None:
    """Loss and gradient against torch's, with logits far from zero: losses are near 100."""
    full = 40 * drawn(5, 7, 96, seed=3)
    targets = torch.randint(96, (5, 7), generator=torch.Generator().manual_seed(4))
    share = tp.slice_of(96, "vocabulary")
    reference, local = full.clone().requires_grad_(), full[..., share].clone().requires_grad_()
    expected = F.cross_entropy(reference.flatten(0, 1), targets.flatten(), reduction="none")
    found = vocab_parallel_cross_entropy(local, targets, tp)
    torch.testing.assert_close(found.flatten(), expected, atol=1e-3, rtol=0)
    expected.square().sum().backward()
    found.square().sum().backward()
    assert reference.grad is not None and local.grad is not None
    torch.testing.assert_close(local.grad, reference.grad[..., share], atol=1e-3, rtol=0)


def check_exchange(sp: SequenceParallel) -> None:
    """Positions to heads and back, and the gradients, which take the other way."""
    whole, grad = drawn(2, 6, 8, 3), drawn(2, 6, 8, 3, seed=1)
    x = sp.own(whole, 2).clone().requires_grad_()
    heads = positions_to_heads(x, sp)
    torch.testing.assert_close(heads, sp.own(whole))
    torch.testing.assert_close(heads_to_positions(heads, sp), x)
    (found,) = torch.autograd.grad(heads, x, sp.own(grad))
    torch.testing.assert_close(found, sp.own(grad, 2))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    group = TensorParallel(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    check_collectives(group)
    check_cross_entropy(group)
    check_exchange(SequenceParallel(dist.group.WORLD, group.rank, group.size))
    dist.destroy_process_group()
