"""Gradient clipping by the norm of the whole model, whatever its layout, and refused steps.

A step whose gradient is not finite anywhere changes nothing anywhere. ZeRO's optimizers do this
themselves: they know the norm over all ranks before they touch a weight, and set `overflow`. fp32
without ZeRO has no wrapper, and `clip_fp32_gradients` counts, on pipeline stages after the first,
only the slices of tensor-parallel layers: `own_whole_step` takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.errors import NonFiniteError


def _counts_here(parameter: nn.Parameter, tp_rank: int) -> bool:
    """Whether this rank is the one that adds the parameter to the norm.

    Slices count everywhere, whole copies on the first tensor-parallel rank, and an embedding that
    a later pipeline stage uses again (DeepSpeed marks it) only where it came from.
    """
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return tp_rank == 0 or bool(getattr(parameter, "model_parallel", False))


def whole_norm(
    parameters: Iterable[nn.Parameter], *, tp_rank: int, replica: dist.ProcessGroup | None
) -> float:
    """The norm of the gradient over all ranks of `replica`: the same number on each of them.

    Copies that do not count must still be finite: infinity in one makes the norm infinite.
    """
    present = [p for p in parameters if p.grad is not None]
    square = torch.zeros(())
    if present:
        gradients = [p.grad.float() for p in present if p.grad is not None]
        squares = torch.stack(list(torch._foreach_norm(gradients))).square()
        counted = torch.tensor([_counts_here(p, tp_rank) for p in present], device=squares.device)
        square = torch.where(counted | ~torch.isfinite(squares), squares, 0.0).sum()
    square = _on_collective_device(square)
    if dist.is_initialized() and dist.get_world_size(replica) > 1:
        dist.all_reduce(square, group=replica)
    return float(square.sqrt())


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale the gradients so that their norm is at most `max_norm`; 0 leaves them."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if max_norm > 0 and norm > max_norm:
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))


def own_whole_step(
    optimizer: torch.optim.Optimizer,
    *,
    max_norm: float,
    tp_rank: int,
    replica: dist.ProcessGroup | None,
) -> None:
    """Make `optimizer.step` clip by the whole norm, or refuse if that is not finite.

    The two attributes it sets are those that DeepSpeed's engine looks for after a step.
    """
    target: Any = optimizer
    apply = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = whole_norm(parameters, tp_rank=tp_rank, replica=replica)
        target._global_grad_norm = norm
        target.overflow = not math.isfinite(norm)
        if target.overflow:
            return None
        clip_gradients(parameters, norm, max_norm)
        return apply(*args, **kwargs)

    target.overflow = False
    target.step = step


def _on_collective_device(value: Tensor) -> Tensor:
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return value.cuda() if on_gpu else value


# Find the first layer whose output, or whose gradient, is not finite.


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _check(name: str, what: str, value: Any) -> None:
    for tensor in _tensors(value):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise NonFiniteError(f"detect_anomaly: the {what} of {name} is not finite")


def _after_forward(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
    _check(name, f"output ({type(module).__name__})", output)


def _after_backward(name: str, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
    _check(name, f"gradient ({type(module).__name__})", grad_output)


def watch(module: nn.Module) -> None:
    """Check every leaf layer of `module` in forward and backward; slow, for debugging."""
    for name, part in module.named_modules():
        if next(part.children(), None) is None:
            part.register_forward_hook(partial(_after_forward, name or type(part).__name__))
            part.register_full_backward_hook(partial(_after_backward, name or type(part).__name__))
