"""One attention function, several engines: checks the call, picks an engine, runs it."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron.engines.call import Call, checked_call
from megatron.errors import EngineError

ENGINES = ("auto", "naive", "tiled", "triton", "flex")

# `auto` refuses dense attention whose scores would take more bytes than this.
DENSE_LIMIT = 16 * 2**30
# Below this many queries the dense scores are small and dense attention is the fastest.
_TILED_MIN_QUERIES = 8


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    query_features: Tensor | None = None,
    distance_features: Tensor | None = None,
    row_scale: Tensor | None = None,
    key_bias: Tensor | None = None,
    first_key: Tensor | None = None,
    sink: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    engine: str = "auto",
    pruning: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Causal attention with a bias that is learned; gradients for every floating argument.

    q is [B, H, Lq, D]. k and v are [B, Hk, Lk, D] with Lk >= Lq: the queries are the last Lq
    positions, so cached keys come first. Hk divides H: query heads h * H/Hk ... share key head h.
    Tensors [B, L, H, D] are refused where a shape tells (a table, Hk < H, Lq < Lk, a key_bias) and
    warned of above 128 heads and fewer keys; else nothing can tell them from L heads of H tokens.
    The score of key n for the query at position m, at distance d = m - n >= 0, is

        row_scale[m] * ((q.k) * scale * weight[d] + bias[d]
                        + sum over r of query_features[m, r] * distance_features[r, d]
                        + key_bias[n])

    * bias, weight: fp32 tables [H, >= Lk], entry d for distance d.
    * query_features [B, H, Lq, R], distance_features [H or 1, R, E], R <= 64: a bias that depends
      on the query; 0 from distance E on. Their product is never made for all distances.
    * row_scale: fp32 [B or 1, H or 1, Lq], positive: a factor of the query's scores (a temperature
      by position). It does not scale the sink.
    * key_bias: fp32 [B or 1, H or 1, Lk]. The decay of a forget gate is minus the cumulative sum of
      its logarithms; -inf hides a key (padding), and a query that sees no key gives 0.
    * first_key: integers [B, Lq], rising: the first key each query sees, at most its own. Documents
      packed into one sequence then do not see each other, and their tiles are not visited.
    * sink: [H] or [B, H, Lq], one more logit in the denominator of the softmax, with no value.
    * window: keys at this distance or more are not seen.
    * scale: a number, 1/sqrt(D) unless given.

    `engine` is one of auto, naive, tiled (CPU), triton and flex (GPU); `auto` picks by device,
    dtype and length. `pruning` lets an engine leave out keys whose bias has provably
    decayed below rounding. `seed`, an integer or a tensor of one, decides which weights `dropout`
    drops, the same in every engine; without it one is drawn from `generator`, or torch's own.
    Under torch.autocast nothing is cast: the output has q's dtype.
    """
    call = checked_call(
        *(q, k, v, bias, weight, key_bias, first_key, sink),
        *(query_features, distance_features, row_scale),
        _seed_of(seed, generator) if dropout > 0.0 else None,
        window=window,
        scale=scale,
        dropout=dropout,
        pruning=pruning,
    )
    with _without_autocast(call.q.device):
        return _run(call, choose_engine(call, engine))


def _run(call: Call, chosen: str) -> Tensor:
    if chosen == "triton":
        from megatron.engines.triton_attention import triton_attention

        return triton_attention(call)
    if chosen == "tiled":
        from megatron.engines.cpu import tiled_attention

        return tiled_attention(call)
    if chosen == "flex":
        from megatron.engines.flex import flex_engine

        return flex_engine(call)
    from megatron.engines.reference import naive_attention

    return naive_attention(call)


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """The tensors' dtypes decide: autocast would round scores in engines made of torch's products,
    and not in the others."""
    if device.type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _seed_of(seed: int | Tensor | None, generator: torch.Generator | None) -> Tensor:
    if seed is not None:
        return torch.as_tensor(seed)
    device = "cpu" if generator is None else generator.device
    return torch.randint(2**62, (), generator=generator, device=device)


def choose_engine(call: Call, engine: str = "auto") -> str:
    """The engine to run: the one asked for (an error if it cannot run), or `auto`'s choice."""
    if engine not in ENGINES:
        raise EngineError(
            f"attention engine {engine!r} is unknown; use one of {', '.join(ENGINES)}"
        )
    if engine == "auto":
        if call.q.is_cuda and why_not_triton(call) is None:
            return "triton"
        if call.q_len >= _TILED_MIN_QUERIES and why_not_tiled(call) is None:
            return "tiled"
        if call.q_len >= _TILED_MIN_QUERIES and _falls_back_to_flex(call):
            return "flex"
        _check_dense_fits(call)
        return "naive"
    reasons = {"tiled": why_not_tiled, "triton": why_not_triton, "flex": why_not_flex}
    if engine in reasons and (reason := reasons[engine](call)) is not None:
        raise EngineError(f"attention engine {engine!r} cannot run this call: {reason}")
    return engine


def explain_engine(
    engine: str, *, device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float
) -> str:
    """The engine that will run a model's calls and, where that is the dense one, why."""
    q = torch.empty(1, 1, _TILED_MIN_QUERIES, head_dim, device=device, dtype=dtype)
    call = checked_call(q, q, q, dropout=dropout)
    chosen = choose_engine(call, engine)
    if chosen != "naive":
        return chosen
    return f"naive ({'as asked for' if engine == 'naive' else _why_dense(call)})"


def _why_dense(call: Call) -> str:
    """Why `auto` has nothing better than dense scores for this call."""
    reason = why_not_triton(call) if call.q.is_cuda else why_not_tiled(call)
    return reason or "there are few queries"


def _check_dense_fits(call: Call) -> None:
    batch, heads, queries, _ = call.q.shape
    size = 4 * batch * heads * queries * call.k_len
    if size > DENSE_LIMIT:
        raise EngineError(
            f"dense attention would hold {size / 2**30:.0f} GB of scores for {queries} queries and "
            f"{call.k_len} keys; the engines that need less memory cannot run: "
            f"{_why_dense(call)}. attention_engine: naive computes it anyway."
        )


def why_not_flex(call: Call) -> str | None:
    """Why FlexAttention cannot run this call, with the fix; None if it can."""
    from megatron.engines import flex

    return flex.why_not_flex(call)


def _falls_back_to_flex(call: Call) -> bool:
    """On GPUs that the Triton engine has no kernels for."""
    if call.q.device.type == "cpu":
        return False
    from megatron.engines import flex

    return flex.is_fall_back(call.q.device) and flex.why_not_flex(call) is None


def why_not_tiled(call: Call) -> str | None:
    """Why the tiled engine cannot run this call, with the fix; None if it can."""
    if call.q.device.type != "cpu":
        return f"it runs on CPU, the tensors are on {call.q.device}; use engine 'auto' or 'triton'"
    if call.q.dtype == torch.float64:
        return "it computes in fp32, the tensors are float64; use engine 'naive' or 'auto'"
    return None


def why_not_triton(call: Call) -> str | None:
    """Why the Triton engine cannot run this call, with the fix; None if it can."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not call.q.is_cuda and not interpreted:
        return f"it runs on GPU, the tensors are on {call.q.device}; use engine 'auto' or 'tiled'"
    from megatron.engines.triton_attention import can_run

    return can_run(call)
