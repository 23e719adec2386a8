"""The `triton` attention engine: FlashAttention-style kernels with tables over distance.

Scores are never stored: memory is O(length). Forward and backward (gradients of q, k, v, the
tables, the key bias and the sink) are deterministic. The kernels are in triton_forward.py
and triton_backward.py, tile sizes in triton_tiles.py; docs/triton.md explains them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.engines import triton_runtime
from megatron.engines.call import OPERANDS, Call
from megatron.engines.operators import graph_operator
from megatron.engines.triton_launch import (
    backward_launches,
    feature_gradients,
    forward_launches,
    table_gradient,
)
from megatron.engines.triton_problem import ALIGNMENT, Problem, aligned, build_problem, padded
from megatron.engines.triton_pruning import visible_distances
from megatron.engines.triton_runtime import cdiv, next_power_of_2, run_on

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_HEAD_DIM = 256


def can_run(call: Call) -> str | None:
    """None if the engine can run this call, otherwise the reason and what to do."""
    q = call.q
    if (reason := triton_runtime.unavailable()) is not None:
        return reason
    if q.dtype not in _DTYPES:
        return f"it takes bf16, fp16 or fp32; got {q.dtype}"
    if q.shape[-1] > _MAX_HEAD_DIM:
        return f"head dim {q.shape[-1]} is above its limit of {_MAX_HEAD_DIM}"
    if (reason := triton_runtime.grid_problem(*q.shape[:2])) is not None:
        return reason
    if triton_runtime.interpreted():
        if q.dtype == torch.bfloat16:
            return "Triton's interpreter cannot multiply bf16; use fp16 or fp32 there"
        return None
    return _unsuitable_device(q.device)


@torch.compiler.assume_constant_result
def _unsuitable_device(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return f"it runs on NVIDIA GPUs, the tensors are on {device}; use engine 'auto'"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"it needs compute capability 8.0 or newer (A100), {device} has {major}.{minor}"
    return triton_runtime.launcher_problem()


def triton_attention(call: Call) -> Tensor:
    """The engine's attention for a call that it can run (`can_run`)."""
    if torch.compiler.is_compiling():  # one node of the graph
        return _with_whole_vectors(call, _operator)
    return pruned_attention(call, _visible(call))


def _visible(call: Call) -> Tensor | None:
    return visible_distances(call) if call.pruning else None


def pruned_attention(call: Call, visible: Tensor | None) -> Tensor:
    """Attention that need not visit keys at distance visible[h] or more; all without `visible`."""

    def attend(call: Call) -> Tensor:
        out: Tensor = _TritonAttention.apply(call, visible, *call.operands())
        return out

    return _with_whole_vectors(call, attend)


def _with_whole_vectors(call: Call, attend: Callable[[Call], Tensor]) -> Tensor:
    """Attention with the head dim padded for the kernels: zeros change no product."""
    width = call.q.shape[-1]
    missing = padded_head_dim(width, call.q.dtype) - width
    if not missing:
        return attend(call)
    q, k, v = (F.pad(x, (0, missing)) for x in (call.q, call.k, call.v))
    return attend(replace(call, q=q, k=k, v=v))[..., :width]


def padded_head_dim(head_dim: int, dtype: torch.dtype) -> int:
    """The kernels' head dim: a multiple of 16; in fp32 a power of 2, which needs no mask."""
    if dtype == torch.float32:
        return max(32, next_power_of_2(head_dim))
    return cdiv(head_dim, ALIGNMENT) * ALIGNMENT


class _TritonAttention(torch.autograd.Function):
    """The call's tensors are also passed as arguments, so that autograd tracks them."""

    @staticmethod
    def forward(ctx: Any, call: Call, visible: Tensor | None, *tensors: Tensor | None) -> Tensor:
        problem = build_problem(call, visible)
        launches, out, lse = forward_launches(problem)
        run_on(out, *launches)
        # q, k and v are the problem's: not kept twice where it had to copy them
        laid_out = (*problem.operands(), problem.own, problem.visible, problem.row_hashes)
        ctx.save_for_backward(*tensors[3:], *laid_out, out, lse)
        settings = ("window", "scale", "dropout", "arch", "shared_memory")
        ctx.settings = {name: getattr(problem, name) for name in settings}
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        *saved, own, visible, hashes, out, lse = ctx.saved_tensors
        terms = len(OPERANDS) - 3
        kept = {"own": own, "visible": visible, "row_hashes": hashes}
        problem = Problem(*saved[terms:], **ctx.settings | kept)
        given = Call(problem.q, problem.k, problem.v, *saved[:terms])
        made = (out, lse, grad_out)
        return None, None, *_gradients(problem, given, made, ctx.needs_input_grad[2:])


def _gradients(
    problem: Problem, given: Call, made: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    """The needed gradients of what was given, from the output, its logsumexp and gradient."""
    out, lse, grad = made
    wanted = {name for name, needs in zip(OPERANDS, needed, strict=True) if needs}
    launches, found, delta = backward_launches(problem, out, lse, aligned(grad), wanted)
    run_on(out, *launches)
    for name in found.keys() & {"bias", "weight"}:
        factor = problem.scale if name == "weight" else 1.0
        found[name] = table_gradient(problem, found[name], factor)
    if "query_features" in found:
        feature_gradients(problem, found)
    if "row_scale" in found:
        found["row_scale"] = _row_scale_gradient(problem, found["row_scale"], lse, delta)
    if "sink" in wanted:
        found["sink"] = _sink_gradient(problem, lse, delta)
    return given.match_operands(found)


def _sink_gradient(problem: Problem, lse: Tensor, delta: Tensor) -> Tensor:
    """-p_sink * delta, [B, H, Lq]: a sink takes probability and adds no output."""
    assert problem.sink is not None
    shape, rows = problem.sink.shape, slice(0, problem.q.shape[2])
    share = torch.exp2(problem.sink - lse.view(shape))
    return (-share * delta.view(shape))[..., rows]


def _row_scale_gradient(problem: Problem, sums: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """From sums of dS * score without the key origin, which a sink keeps from cancelling."""
    grad = sums.unflatten(0, problem.q.shape[:2])[..., : problem.q_len]
    if problem.own is not None and problem.sink is not None:
        grad = grad - problem.own[..., : problem.q_len] * _sink_gradient(problem, lse, delta)
    return grad


# For torch.compile


def _operator_forward(call: Call) -> tuple[Tensor, Tensor]:
    launches, out, lse = forward_launches(build_problem(call, _visible(call)))
    run_on(out, *launches)
    return out, lse


def _operator_backward(
    call: Call, made: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    return _gradients(build_problem(call, _visible(call)), call, made, needed)


_operator = graph_operator(
    "triton_attention",
    _operator_forward,
    _operator_backward,
    lambda q: (q.shape[0] * q.shape[1], padded(q.shape[2])),
)
