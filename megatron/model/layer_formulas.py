"""The formulas of a layer beside positions: activations and norms by their GPT-NeoX names, and what
a layer may learn about its scores: a gate, a sink, a sharper softmax.

forget_gate       score + c_m - c_n, c the running sum of log sigmoid(gate of the layer's input)
attention_sinks   one more logit per head in the denominator of the softmax, with no value
scalable_softmax  q times s log n for a query that sees n keys, s learned per head
attention_temperature   all scores of a query times a number that grows with its position

Layers may differ in these and in their positions: `pattern_places` reads the key layer_pattern.
Torch only: every exported model contains this file.
Shapes: B batch, H heads, L length, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle, islice, repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .position_base import ALIASES, at_least_fp32

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "softsign": F.softsign,
    "swish": F.silu,
    "silu": F.silu,
    "mish": F.mish,
}
GATED: dict[str, Activation] = {
    "geglu": F.gelu,
    "swiglu": F.silu,
    "reglu": F.relu,
    "glu": torch.sigmoid,
    "bilinear": lambda gate: gate,
}


def activation_named(name: str) -> Activation:
    """What lies between a feed-forward block's two projections; a gated one halves its input."""
    if name in GATED:
        return partial(_gated, GATED[name])
    if name not in ACTIVATIONS:
        names = ", ".join([*ACTIVATIONS, *GATED])
        raise ValueError(f"activation {name!r} is unknown; choose one of {names}")
    return ACTIVATIONS[name]


def _gated(activation: Activation, y: Tensor) -> Tensor:
    value, gate = y.chunk(2, dim=-1)
    return value * activation(gate)


class ScaleNorm(nn.Module):
    """x / |x|, times one learned number."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(1))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True).clamp(min=self.eps) * self.g


class RMSNorm(nn.Module):
    """x / rms(x) over the last dimension, times a learned scale; computed in fp32."""

    def __init__(self, size: int | tuple[int, ...], eps: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x, self.scale)

    def scaled(self, x: Tensor, scale: Tensor) -> Tensor:
        scale = scale.float()
        if scale.dim() == 1:
            return F.rms_norm(x.float(), scale.shape, scale, self.eps).to(x.dtype)
        return (F.rms_norm(x.float(), scale.shape[-1:], eps=self.eps) * scale).to(x.dtype)


NORM_EPSILONS = {
    "layernorm": "layernorm_epsilon",
    "rmsnorm": "rms_norm_epsilon",
    "scalenorm": "scalenorm_epsilon",
    "non_parametric_layernorm": "layernorm_epsilon",
}
"""The config key that holds each norm's epsilon."""


def build_norm(name: str, size: int | tuple[int, ...], eps: float, bias: bool) -> nn.Module:
    """The norm called `name`; of queries and keys, `size` is (heads, head_dim)."""
    if name == "rmsnorm":
        return RMSNorm(size, eps)
    if name == "scalenorm":
        return ScaleNorm(eps)
    return nn.LayerNorm(size, eps=eps, elementwise_affine=name == "layernorm", bias=bias)


def norm_sizes(config: Any) -> tuple[int, int] | None:
    """How many numbers `qk_norm` normalises at once: of queries, and of keys."""
    heads, width = config.num_attention_heads, config.head_dim
    if config.qk_norm is None:
        return None
    if config.qk_norm == "per_head":
        return width, width
    return heads * width, (config.num_kv_heads or heads) * width


def normed_heads(norm: RMSNorm, x_BLHD: Tensor, scale: Tensor | None = None) -> Tensor:
    """Queries or keys after their `qk_norm`, over each head or over all."""
    scale = norm.scale if scale is None else scale
    if scale.shape[0] == x_BLHD.shape[-1]:
        return norm.scaled(x_BLHD, scale)
    return norm.scaled(x_BLHD.flatten(-2), scale).view_as(x_BLHD)


# Scores.


def log_gates(logits_BLH: Tensor) -> Tensor:
    """log f [B, H, L] of the gates f = sigmoid(logits), in fp32."""
    return F.logsigmoid(at_least_fp32(logits_BLH)).transpose(1, 2)


def gate_sums(
    gates_BHL: Tensor, before_BH: Tensor | None = None, starts_BL: Tensor | None = None
) -> Tensor:
    """c [B, H, L]: the sum of log f up to each token, its own included.

    A score decays by every gate after its key (Forgetting Transformer): c_m - c_n. `before` is
    the sum of earlier tokens, in a cache. With `starts`, the first token of each token's document,
    sums begin anew there, so that no document's numbers depend on those before it.
    """
    # Sums reach 10^4, where fp32 has three decimals left; differences of them are what counts.
    wide = torch.float32 if gates_BHL.device.type == "mps" else torch.float64
    sums = gates_BHL.to(wide).cumsum(-1)
    if before_BH is not None:
        sums = sums + before_BH[..., None]
    if starts_BL is not None:
        earlier = F.pad(sums, (1, 0)).gather(-1, starts_BL[:, None].expand_as(sums))
        sums = sums - earlier
    return sums


def keys_seen(
    queries: int,
    *,
    offset: int = 0,
    window: int | None = None,
    starts_BL: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """n [B or 1, L]: how many keys each query sees, its own included."""
    n = torch.arange(offset + 1, offset + queries + 1, device=device)[None]
    if starts_BL is not None:
        n = n - starts_BL
    return n if window is None else n.clamp(max=window)


def sharpened(q_BHLD: Tensor, scale_H: Tensor, n_BL: Tensor) -> Tensor:
    """q times s log n (SSMax): attention to many keys stays as sharp as to few."""
    scale_H = at_least_fp32(scale_H)
    factor_BHL = scale_H[:, None] * n_BL.to(scale_H.dtype).log()[:, None]
    return (q_BHLD * factor_BHL[..., None]).to(q_BHLD.dtype)


def temperatures(n_BL: Tensor, floor: int, alpha: float) -> Tensor:
    """1 + alpha * log(max(1, n / floor)) for the n-th token, n from 1, [B or 1, 1, L] in fp32."""
    return (1 + alpha * (n_BL.float() / floor).clamp(min=1).log())[:, None]


def pattern_places(pattern: Sequence[Mapping[str, Any]], num_layers: int) -> list[int]:
    """Which entry of a layer_pattern each layer takes: the list, repeated until num_layers."""
    runs = (repeat(place, entry.get("count", 1)) for place, entry in enumerate(pattern))
    once = list(islice(chain.from_iterable(runs), num_layers))
    return list(islice(cycle(once), num_layers))


def kernel_groups(configs: Mapping[int, Any], options: Sequence[str]) -> list[list[int]]:
    """Which layers share a kernel: those with one pos_emb and the same values of its options.

    `configs` has the keys of each layer that has a kernel.
    """
    found: dict[tuple[str, ...], list[int]] = {}
    for number, config in configs.items():
        values = (repr(getattr(config, key)) for key in options)
        name = ALIASES.get(config.pos_emb, config.pos_emb)
        found.setdefault((name, *values), []).append(number)
    return list(found.values())


def softmax_scale_start(length: int, window: int | None = None) -> float:
    """Where s starts: s log n is 1 on average over a training sequence, as in a plain softmax."""
    reach = min(length, window or length)
    logs = math.lgamma(reach + 1) + (length - reach) * math.log(reach)
    return length / logs if logs > 0 else 1.0


@dataclass(frozen=True)
class PerHeadNumber:
    """A number that every head of every layer learns about its scores; it is kept in fp32.

    `key` is the model key that asks for it, `start` its first value by the model's keys.
    """

    key: str
    start: Callable[[Any], float]


PER_HEAD = {
    "sinks": PerHeadNumber("attention_sinks", lambda config: 0.0),
    "softmax_scale": PerHeadNumber(
        "scalable_softmax",
        lambda config: softmax_scale_start(config.seq_length, config.attention_window),
    ),
}
"""The parameter's name in a layer's attention -> what it is, for our model and for an export."""


def per_head_starts(config: Any) -> dict[str, float | None]:
    """The first value of each number of `PER_HEAD`; None for those that the keys do not ask for."""
    return {
        name: number.start(config) if getattr(config, number.key) else None
        for name, number in PER_HEAD.items()
    }
