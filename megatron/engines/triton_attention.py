"""The `triton` attention engine: FlashAttention-style kernels with tables over distance.

Scores are never stored: memory is O(length). Forward and backward (gradients of q, k, v, the
tables, the key bias and the sink) are deterministic. The kernels are in triton_forward.py,
triton_backward.py and triton_band.py, tile sizes in triton_tiles.py; docs/triton.md explains them.
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
    launcher_problem,
    next_power_of_2,
    unavailable,
)
from megatron.engines.triton_launch import (
    Wanted,
    backward_launches,
    forward_launches,
    table_gradient,
)
from megatron.engines.triton_problem import ALIGNMENT, Problem, aligned, build_problem
from megatron.errors import EngineError

__all__ = ["can_run", "padded_head_dim", "triton_attention"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_HEAD_DIM = 256


def can_run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    dropout: float = 0.0,
    key_bias: Tensor | None = None,
    first_key: Tensor | None = None,
    sink: Tensor | None = None,
) -> str | None:
    """None if the engine can run this call, otherwise the reason and what to do."""
    if dropout > 0.0:
        return f"it has no attention dropout (dropout={dropout}); set attention_dropout to 0"
    if (reason := unavailable()) is not None:
        return reason
    tensors = [x for x in (q, k, v, bias, weight, key_bias, first_key, sink) if x is not None]
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
    return launcher_problem()


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    key_bias: Tensor | None = None,
    first_key: Tensor | None = None,
    sink: Tensor | None = None,
    window: int | None = None,
    scale: float,
    visible: Tensor | None = None,
) -> Tensor:
    """Causal attention with score = (q.k) * scale * weight[h, d] + bias[h, d] + key_bias[n].

    q [B, H, Lq, D] are the last Lq of the Lk positions of k, v [B, Hk, Lk, D], where H is a
    multiple of Hk; the tables are [H, >= Lk] over the distance d, the window keeps d < window.
    key_bias is [B or 1, H or 1, Lk], first_key [B, Lq] non-decreasing integers at most the
    query's own position, sink [H] or [B, H, Lq] one more logit of the denominator.
    `visible` (int32 [H]) is a promise that keys at distance visible[h] or more contribute
    nothing that survives rounding: tiles wholly beyond it are not visited.
    """
    reason = can_run(q, k, v, bias, weight, 0.0, key_bias, first_key, sink)
    if reason is not None:
        raise EngineError(f"attention engine 'triton' cannot run this call: {reason}")
    _check_shapes(q, k, key_bias, first_key, sink, visible)
    width = q.shape[-1]
    if (missing := padded_head_dim(width, q.dtype) - width) != 0:  # zeros change no product
        q, k, v = (F.pad(x, (0, missing)) for x in (q, k, v))
    length = k.shape[2]
    window = length if window is None else min(window, length)
    out: Tensor = _TritonAttention.apply(
        q, k, v, bias, weight, key_bias, sink, first_key, visible, window, scale
    )
    return out[..., :width] if missing else out


def _check_shapes(
    q: Tensor,
    k: Tensor,
    key_bias: Tensor | None,
    first_key: Tensor | None,
    sink: Tensor | None,
    visible: Tensor | None,
) -> None:
    """What the kernels could not notice: a wrong shape would read other memory."""
    batch, heads, q_length, _ = q.shape
    k_length = k.shape[2]
    if heads % k.shape[1] != 0:
        raise EngineError(f"{heads} query heads cannot share {k.shape[1]} key heads evenly")
    shapes: dict[str, tuple[Tensor | None, list[tuple[int, ...]]]] = {
        "key_bias": (key_bias, [(b, h, k_length) for b in (batch, 1) for h in (heads, 1)]),
        "first_key": (first_key, [(batch, q_length)]),
        "sink": (sink, [(heads,), (batch, heads, q_length)]),
        "visible": (visible, [(heads,)]),
    }
    for name, (x, allowed) in shapes.items():
        if x is not None and tuple(x.shape) not in allowed:
            wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(allowed))
            raise EngineError(f"{name} must be {wanted}, got {list(x.shape)}")


def padded_head_dim(head_dim: int, dtype: torch.dtype) -> int:
    """The head dim to hand to the kernels: whole vectors; in fp32 no room for masks in registers"""
    if dtype == torch.float32:
        return max(32, next_power_of_2(head_dim))
    return cdiv(head_dim, ALIGNMENT) * ALIGNMENT


class _TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        weight: Tensor | None,
        key_bias: Tensor | None,
        sink: Tensor | None,
        first_key: Tensor | None,
        visible: Tensor | None,
        window: int,
        scale: float,
    ) -> Tensor:
        problem = build_problem(
            q, k, v, bias, weight, key_bias, first_key, sink, visible, window, scale
        )
        launches, out, lse = forward_launches(problem)
        with device_of(q):
            for launch in launches:
                launch.run()
        ctx.save_for_backward(
            problem.q, problem.k, problem.v, bias, weight, problem.key_bias, problem.own,
            problem.first_key, problem.sink, problem.visible, out, lse,
        )  # fmt: skip
        ctx.settings = (window, scale, problem.arch)
        ctx.shapes = tuple(None if x is None else (x.shape, x.dtype) for x in (key_bias, sink))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        *operands, out, lse = ctx.saved_tensors
        problem = Problem(*operands, *ctx.settings)
        needs = ctx.needs_input_grad
        wanted = Wanted(
            q=needs[0],
            keys=needs[1] or needs[2] or needs[5],
            bias=needs[3],
            weight=needs[4],
            key_bias=needs[5],
        )
        launches, result = backward_launches(problem, out, lse, aligned(grad_out), wanted)
        with device_of(problem.q):
            for launch in launches:
                launch.run()
        dbias = dweight = dkey_bias = dsink = None
        if result.dbias_bands is not None and problem.bias is not None:
            dbias = table_gradient(problem, result.dbias_bands, problem.bias)
        if result.dweight_bands is not None and problem.weight is not None:
            dweight = table_gradient(problem, result.dweight_bands, problem.weight, problem.scale)
        if result.dkey_bias is not None:
            dkey_bias = _summed_to(result.dkey_bias, *ctx.shapes[0])
        if needs[6] and problem.sink is not None:
            dsink = _summed_to(_sink_gradient(problem, lse, result.delta), *ctx.shapes[1])
        grads = (result.dq, result.dk, result.dv, dbias, dweight, dkey_bias, dsink)
        return *grads, None, None, None, None


def _sink_gradient(problem: Problem, lse: Tensor, delta: Tensor) -> Tensor:
    """-p_sink * delta, [B, H, Lq]: a sink takes probability and gives no output."""
    batch, heads, q_length, _ = problem.q.shape
    assert problem.sink is not None
    rows = lse.view(batch, heads, -1)[..., :q_length]
    share = torch.exp2(problem.sink - rows)
    return -share * delta.view(batch, heads, -1)[..., :q_length]


def _summed_to(grad: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Sum a [B, H, L] gradient over the axes along which its operand was broadcast."""
    if len(shape) == 1:
        return grad.sum((0, 2)).to(dtype)
    axes = [i for i in range(3) if shape[i] == 1 and grad.shape[i] != 1]
    return (grad.sum(axes, keepdim=True) if axes else grad).to(dtype)
