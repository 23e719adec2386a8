"""The CPU engine: O(length) memory in forward and backward, fp32 inside, exact pruning by decay.

Runs the compiled C++ implementation where there is a compiler, the PyTorch one elsewhere.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.engines.cpp_build import load_library
from megatron.engines.cpu_compiled import CompiledBackend
from megatron.engines.cpu_torch import TorchBackend
from megatron.engines.pruning import TileCount, decay_bounds
from megatron.engines.tiling import Backend, Inputs, Saved

__all__ = ["tiled_attention", "tiled_forward_with_count"]


def tiled_attention(
    q_BHLD: Tensor,
    k_BHLD: Tensor,
    v_BHLD: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    *,
    window: int | None,
    scale: float,
    pruning: bool = True,
) -> Tensor:
    return _Tiled.apply(q_BHLD, k_BHLD, v_BHLD, bias, weight, window, scale, pruning)


def tiled_forward_with_count(
    q_BHLD: Tensor,
    k_BHLD: Tensor,
    v_BHLD: Tensor,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
    pruning: bool = True,
) -> tuple[Tensor, TileCount]:
    """Forward without gradients, and how many tiles the pruning left to visit."""
    scale = q_BHLD.shape[-1] ** -0.5 if scale is None else scale
    inputs = _inputs(q_BHLD, k_BHLD, v_BHLD, bias, weight, window, scale)
    bounds = decay_bounds(inputs.bias, inputs.weight, k_BHLD.shape[2]) if pruning else None
    saved, count = _backend().forward(inputs, bounds)
    return saved.out.to(q_BHLD.dtype), count


def _backend() -> Backend:
    library = load_library()
    return _torch_backend() if library is None else _compiled_backend(library)


@functools.cache
def _compiled_backend(library: Any) -> Backend:
    return CompiledBackend(library)


@functools.cache
def _torch_backend() -> Backend:
    return TorchBackend()


def _inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    window: int | None,
    scale: float,
    needs: tuple[bool, bool] = (False, False),
) -> Inputs:
    return Inputs(
        q.detach().float(),
        k.detach().float(),
        v.detach().float(),
        None if bias is None else bias.detach().float(),
        None if weight is None else weight.detach().float(),
        window,
        scale,
        *needs,
    )


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        weight: Tensor | None,
        window: int | None,
        scale: float,
        pruning: bool,
    ) -> Tensor:
        inputs = _inputs(q, k, v, bias, weight, window, scale)
        bounds = decay_bounds(inputs.bias, inputs.weight, k.shape[2]) if pruning else None
        backend = _backend()
        saved, _ = backend.forward(inputs, bounds)
        out = saved.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, bias, weight, out, saved.lse)
        ctx.window, ctx.scale, ctx.bounds, ctx.backend = window, scale, bounds, backend
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, weight, out, lse = ctx.saved_tensors
        needs = (ctx.needs_input_grad[3], ctx.needs_input_grad[4])
        inputs = _inputs(q, k, v, bias, weight, ctx.window, ctx.scale, needs)
        saved = Saved(out.float(), lse)
        grads = ctx.backend.backward(inputs, ctx.bounds, saved, grad_out.float())
        return (
            grads.q.to(q.dtype),
            grads.k.to(k.dtype),
            grads.v.to(v.dtype),
            _table_gradient(grads.bias, bias),
            _table_gradient(grads.weight, weight),
            None,
            None,
            None,
        )


def _table_gradient(grad: Tensor | None, table: Tensor | None) -> Tensor | None:
    """The gradient of a table that may be longer than the keys, in its dtype."""
    if grad is None or table is None:
        return None
    return torch.nn.functional.pad(grad, (0, table.shape[1] - grad.shape[1])).to(table.dtype)
