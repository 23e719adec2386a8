"""`kerple_lr_scale` and `kerple_weight_decay`: the kernel's own learning rate and decay.

Not a parameter group of their own: ZeRO needs the same groups on every pipeline stage, and only
the first has a kernel; and a checkpoint's groups could then not change. Instead the kernel's few
numbers are corrected after the optimizer's step, wherever DeepSpeed keeps them: an optimizer that
moved x by u at rate r has it moved by scale * (u - r * decay * x).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpoints.optimizer_view import Group, groups_of

Span = tuple[int, int]


def kernel_spans(group: Group) -> list[Span]:
    """Where the kernel's elements lie in this rank's part of the flat fp32 numbers."""
    rank, size = 0, 1
    if group.process_group is not None:
        rank, size = dist.get_rank(group.process_group), dist.get_world_size(group.process_group)
    return [
        (start, stop)
        for parameter, start, stop in group.own_spans(rank, size)
        if getattr(parameter, "is_kernel_parameter", False) and stop > start
    ]


def scale_kernel_steps(engine: Any, *, scale: float, decay: float) -> None:
    """Make every step of the engine's optimizer move kernels by their own rate and decay."""
    if scale == 1.0 and decay == 0.0:
        return
    spans = {id(group.master): kernel_spans(group) for group in groups_of(engine)}
    optimizer: Any = engine.basic_optimizer
    apply: Callable[..., Any] = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        # ZeRO hands over one group at a time, so what is stepped is known only now.
        before = [
            (piece, piece.clone(), float(group["lr"]))
            for group in optimizer.param_groups
            for master in group["params"]
            for piece in _pieces(master, spans.get(id(master), []))
        ]
        result = apply(*args, **kwargs)
        with torch.no_grad():
            for piece, old, rate in before:
                piece.copy_(old + scale * (piece - old - rate * decay * old))
        return result

    optimizer.step = step


def _pieces(master: Tensor, spans: list[Span]) -> list[Tensor]:
    flat = master.detach().view(-1)
    return [flat[start:stop] for start, stop in spans]
