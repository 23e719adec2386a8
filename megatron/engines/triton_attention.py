"""The `triton` attention engine: FlashAttention-style kernels with tables over distance.

Scores are never stored: memory is O(length). Forward and backward (gradients of q, k, v, bias
and weight) are deterministic. The kernels are in triton_forward.py and triton_backward.py, the
choice of tiles in triton_launch.py; docs/triton.md explains them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.engines.triton_compat import (
    cdiv,
    device_of,
    interpreted,
    next_power_of_2,
    unavailable,
)
from megatron.engines.triton_launch import (
    BackwardResult,
    Problem,
    backward_launches,
    forward_launch,
)
from megatron.errors import EngineError

__all__ = ["can_run", "padded_head_dim", "triton_attention"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_HEAD_DIM = 256
# rows are loaded 16 elements at a time, from addresses that are multiples of 16 bytes
_ALIGNMENT = 16
# stands in for the number of multiprocessors in the interpreter: enough to split small problems
_INTERPRETER_PROCESSORS = 4


def can_run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    dropout: float = 0.0,
) -> str | None:
    """None if the engine can run this call, otherwise the reason and what to do."""
    if dropout > 0.0:
        return f"it has no attention dropout (dropout={dropout}); set attention_dropout to 0"
    if (reason := unavailable()) is not None:
        return reason
    tensors = [x for x in (q, k, v, bias, weight) if x is not None]
    if any(x.device != q.device for x in tensors):
        return f"its tensors must be on one device, got {sorted({str(x.device) for x in tensors})}"
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in _DTYPES:
        found = f"{q.dtype}, {k.dtype}, {v.dtype}"
        return f"it takes bf16, fp16 or fp32, the same for q, k and v; got {found}"
    if q.shape[-1] > _MAX_HEAD_DIM:
        return f"head dim {q.shape[-1]} is above its limit of {_MAX_HEAD_DIM}"
    if interpreted():
        if q.dtype == torch.bfloat16:
            return "Triton's interpreter cannot multiply bf16; use fp16 or fp32 there"
        return None
    return _unsuitable_device(q.device)


def _unsuitable_device(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return f"it runs on NVIDIA GPUs, the tensors are on {device}; use engine 'auto'"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"it needs compute capability 8.0 or newer (A100), {device} has {major}.{minor}"
    return None


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    window: int | None = None,
    scale: float,
    visible: Tensor | None = None,
) -> Tensor:
    """Causal attention with score = (q.k) * scale * weight[h, d] + bias[h, d].

    q [B, H, Lq, D] are the last Lq of the Lk positions of k, v [B, H, Lk, D]; the tables are
    [H, >= Lk] over the distance d, the window keeps d < window. `visible` (int32 [H]) is a
    promise that keys at distance visible[h] or more contribute nothing that survives rounding:
    tiles that lie wholly beyond it are not visited (others are computed in full).
    """
    if (reason := can_run(q, k, v, bias, weight)) is not None:
        raise EngineError(f"attention engine 'triton' cannot run this call: {reason}")
    if not scale > 0.0:
        raise EngineError(f"attention engine 'triton' needs a positive scale, got {scale}")
    if visible is not None and visible.shape != (q.shape[1],):
        raise EngineError(f"visible must be [heads] = [{q.shape[1]}], got {list(visible.shape)}")
    width = q.shape[-1]
    if (missing := padded_head_dim(width, q.dtype) - width) != 0:  # zeros change no product
        q, k, v = (F.pad(x, (0, missing)) for x in (q, k, v))
    length = k.shape[2]
    window = length if window is None else min(window, length)
    out: Tensor = _TritonAttention.apply(q, k, v, bias, weight, visible, window, scale)
    return out[..., :width] if missing else out


def padded_head_dim(head_dim: int, dtype: torch.dtype) -> int:
    """The head dim to hand to the kernels: whole vectors; in fp32 no room for masks in registers"""
    if dtype == torch.float32:
        return max(32, next_power_of_2(head_dim))
    return cdiv(head_dim, _ALIGNMENT) * _ALIGNMENT


def aligned(x: Tensor) -> Tensor:
    """x itself if the kernels can read its rows in whole vectors, else a contiguous copy."""
    steps = [x.stride(i) for i in range(3) if x.shape[i] > 1]
    good = x.stride(3) == 1 and all(step % _ALIGNMENT == 0 for step in steps)
    # the kernels hold the offsets inside one tile in 32 bits
    small = all(step < 2**31 // 256 for step in steps[-1:])
    return x if good and small and x.data_ptr() % _ALIGNMENT == 0 else x.contiguous().clone()


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETER_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class _TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        weight: Tensor | None,
        visible: Tensor | None,
        window: int,
        scale: float,
    ) -> Tensor:
        q, k, v = aligned(q), aligned(k), aligned(v)
        if visible is None:  # one more load in the kernel is cheaper than kernels of two kinds
            visible = torch.full(q.shape[1:2], window, dtype=torch.int32, device=q.device)
        visible = visible.to(device=q.device, dtype=torch.int32).contiguous()
        problem = Problem(q, k, v, bias, weight, visible, window, scale)
        launch, out, lse = forward_launch(problem)
        with device_of(q):
            launch.run()
        ctx.save_for_backward(q, k, v, bias, weight, visible, out, lse)
        ctx.window, ctx.scale = window, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, weight, visible, out, lse = ctx.saved_tensors
        problem = Problem(q, k, v, bias, weight, visible, ctx.window, ctx.scale)
        launches, result = backward_launches(
            problem,
            out,
            lse,
            aligned(grad_out),
            table_grads=(ctx.needs_input_grad[3], ctx.needs_input_grad[4]),
            processors=_processors(q.device),
        )
        with device_of(q):
            for launch in launches:
                launch.run()
        dq = result.dq_shares.sum(0).mul_(ctx.scale).to(q.dtype)
        dbias = _table_gradient(result.dbias_shares, result, bias, k.shape[2])
        dweight = _table_gradient(result.dweight_shares, result, weight, k.shape[2])
        if dweight is not None:
            dweight.mul_(ctx.scale)
        return dq, result.dk, result.dv, dbias, dweight, None, None, None


def _table_gradient(
    shares: Tensor | None, result: BackwardResult, table: Tensor | None, length: int
) -> Tensor | None:
    """Sum the programs' shares in a fixed order; distances that no query can see get 0."""
    if shares is None or table is None:
        return None
    grad = torch.zeros_like(table)
    grad[:, :length] = shares.sum((0, 1, 3))[:, result.pad : result.pad + length]
    return grad
