"""One attention function, several engines: checks the call, picks an engine, runs it.

Shapes: B batch, H heads, L length (q: Lq, k and v: Lk), D head dim.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.errors import EngineError

__all__ = ["ENGINES", "attention", "choose_engine"]

ENGINES = ("auto", "naive", "tiled", "triton")

# Below this many queries dense scores are small and one pass over them is the fastest.
_TILED_MIN_QUERIES = 8


@dataclass(frozen=True)
class Call:
    """A checked attention call: all that decides which engine can and should run it."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    weight: Tensor | None
    window: int | None
    scale: float
    dropout: float


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    engine: str = "auto",
    pruning: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Causal attention with tables over distance; gradients for q, k, v, bias and weight.

    q is [B, H, Lq, D]; k and v are [B, H, Lk, D] with Lk >= Lq: the queries are the last Lq
    positions, so cached keys come first. bias and weight are fp32 tables [H, >= Lk], entry d for
    distance d. The score of a key at distance d is `(q.k) * scale * weight[d] + bias[d]`; keys
    at distance `window` or more are not seen. `scale` defaults to 1/sqrt(D).

    `engine` is one of auto, naive, tiled (CPU), triton (GPU); `auto` picks by device, dtype,
    length and dropout. `pruning` lets the tiled engine leave out keys whose bias has provably
    decayed below rounding. `generator` seeds the dropout.
    """
    call = _check(q, k, v, bias, weight, window, scale, dropout)
    chosen = choose_engine(call, engine)
    if chosen == "triton":
        return _run_triton(call, pruning)
    if chosen == "tiled":
        from megatron.engines.cpu import tiled_attention

        return tiled_attention(
            q, k, v, bias, weight, window=call.window, scale=call.scale, pruning=pruning
        )
    from megatron.engines.reference import naive_attention

    return naive_attention(
        q,
        k,
        v,
        bias,
        weight,
        window=call.window,
        scale=call.scale,
        dropout=dropout,
        generator=generator,
    )


def _run_triton(call: Call, pruning: bool) -> Tensor:
    from megatron.engines.pruning import visible_keys
    from megatron.engines.triton_attention import triton_attention

    q, k, v, bias, weight = call.q, call.k, call.v, call.bias, call.weight
    visible = visible_keys(q, k, v, bias, weight, call.scale) if pruning else None
    return triton_attention(
        q, k, v, bias, weight, window=call.window, scale=call.scale, visible=visible
    )


def choose_engine(call: Call, engine: str = "auto") -> str:
    """The engine to run: the forced one if it can do the job, else the best one that can."""
    if engine not in ENGINES:
        raise EngineError(
            f"attention engine {engine!r} is unknown; use one of {', '.join(ENGINES)}"
        )
    if engine == "auto":
        if call.q.is_cuda and why_not_triton(call) is None:
            return "triton"
        return "tiled" if _tiled_pays(call) and why_not_tiled(call) is None else "naive"
    reason = {"naive": lambda _: None, "tiled": why_not_tiled, "triton": why_not_triton}[engine](
        call
    )
    if reason is not None:
        raise EngineError(f"attention engine {engine!r} cannot run this call: {reason}")
    return engine


def _tiled_pays(call: Call) -> bool:
    return call.q.shape[2] >= _TILED_MIN_QUERIES


def why_not_tiled(call: Call) -> str | None:
    """Why the tiled engine cannot run this call, with the fix; None if it can."""
    if call.q.device.type != "cpu":
        return f"it runs on CPU, the tensors are on {call.q.device}; use engine 'auto' or 'triton'"
    if call.q.dtype == torch.float64:
        return "it computes in fp32, the tensors are float64; use engine 'naive' or 'auto'"
    if call.dropout > 0.0:
        return (
            f"it has no attention dropout (dropout={call.dropout}); set attention_dropout to 0,"
            " or use engine 'naive' or 'auto'"
        )
    return None


def why_not_triton(call: Call) -> str | None:
    """Why the Triton engine cannot run this call, with the fix; None if it can."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not call.q.is_cuda and not interpreted:
        return f"it runs on GPU, the tensors are on {call.q.device}; use engine 'auto' or 'tiled'"
    try:
        from megatron.engines.triton_attention import can_run
    except ImportError as error:
        return f"triton cannot be imported ({error}); install it, or use engine 'naive'"
    return can_run(call.q, call.k, call.v, call.bias, call.weight, call.dropout)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    window: int | None,
    scale: float | None,
    dropout: float,
) -> Call:
    _check_qkv(q, k, v)
    for name, table in (("bias", bias), ("weight", weight)):
        if table is not None:
            _check_table(name, table, q, k.shape[2])
    if window is not None and window < 1:
        raise EngineError(f"window={window}: must be at least 1, so that a query sees itself")
    if not 0.0 <= dropout < 1.0:
        raise EngineError(f"dropout={dropout}: must be at least 0 and below 1")
    if window is not None and window >= k.shape[2]:
        window = None
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    if not math.isfinite(scale):
        raise EngineError(f"scale={scale}: must be a finite number")
    return Call(q, k, v, bias, weight, window, float(scale), dropout)


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise EngineError(f"q, k, v must be [batch, heads, length, head_dim]; got {shapes}")
    if k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise EngineError(
            f"q, k, v must agree in batch, heads and head_dim, and k, v in length; got {shapes}"
        )
    if q.shape[2] > k.shape[2]:
        raise EngineError(
            f"more queries than keys ({shapes}): the queries are the last positions, so k and v"
            " must hold at least as many"
        )
    if 0 in q.shape:
        raise EngineError(f"q, k, v must not be empty; got {shapes}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise EngineError(
            f"q, k, v must share one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if not q.device == k.device == v.device:
        raise EngineError(f"q, k, v must be on one device; got {q.device}, {k.device}, {v.device}")


def _check_table(name: str, table: Tensor, q: Tensor, k_len: int) -> None:
    heads = q.shape[1]
    if table.dim() != 2 or table.shape[0] != heads or table.shape[1] < k_len:
        raise EngineError(
            f"{name} must be a table [heads={heads}, at least {k_len} distances]; got"
            f" {tuple(table.shape)}: compute the table for the length of the keys"
        )
    if not table.is_floating_point() or table.device != q.device:
        raise EngineError(
            f"{name} must be a floating table on {q.device}; got {table.dtype} on {table.device}"
        )
