"""Positions as functions of distance, for Hugging Face: torch only.

    score(m, n) = (q_m . k_n) / sqrt(head_dim) * weight[h, m - n] + bias[h, m - n]

Tables are fp32 whatever the model's precision: in bf16 distances beyond 256 fall together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMALLEST = 0.01
Values = dict[str, Tensor]


class Bound(NamedTuple):
    """Initial values are uniform in [0, high); a value stays in [0.01, maximum]."""

    high: float
    maximum: float = math.inf


class Kernel(NamedTuple):
    """One formula of distance d [length] and of values per head [heads, 1]."""

    parameters: dict[str, Bound]
    bias: Callable[[Tensor, Values], Tensor] | None = None
    weight: Callable[[Tensor, Values], Tensor] | None = None


def _log1p(x: Tensor) -> Tensor:
    return torch.log(1 + x) if x.dtype == torch.bfloat16 else torch.log1p(x)


def _power(d: Tensor, r: Values) -> Tensor:
    return -r["r1"] * d ** r["r2"]


_ONE, _TWO, _EXPONENT = Bound(1), Bound(2), Bound(2, 2.0)
KERNELS: dict[str, Kernel] = {
    "kerple_log": Kernel(
        {"r1": _TWO, "r2": _ONE}, bias=lambda d, r: -r["r1"] * _log1p(r["r2"] * d)
    ),
    "kerple_power": Kernel({"r1": _ONE, "r2": _EXPONENT}, bias=_power),
    "kerple_log3": Kernel(
        {"r1": _TWO, "r2": _ONE, "r3": _EXPONENT},
        bias=lambda d, r: -r["r1"] * _log1p(r["r2"] * d ** r["r3"]),
    ),
    "kerple_bias_wht": Kernel(
        {"r1": _ONE, "r2": _EXPONENT, "r3": _ONE, "r4": _EXPONENT},
        bias=_power,
        weight=lambda d, r: torch.exp(-r["r3"] * d ** r["r4"]),
    ),
    "gauss_bias2": Kernel(
        {"r1": _ONE, "r2": _ONE}, bias=lambda d, r: r["r1"] * torch.exp(-r["r2"] * d**2)
    ),
    "gauss_bias3": Kernel(
        {"r1": _ONE, "r2": _ONE, "r3": _EXPONENT},
        bias=lambda d, r: r["r1"] * torch.exp(-r["r2"] * d ** r["r3"]),
    ),
    "gauss_wht1": Kernel({"r1": _ONE}, weight=lambda d, r: torch.exp(-r["r1"] * d**2)),
    "gauss_wht2": Kernel(
        {"r1": _ONE, "r2": _EXPONENT}, weight=lambda d, r: torch.exp(-r["r1"] * d ** r["r2"])
    ),
}
FIXED = ("alibi", "kerple_power_original", "sandwich")
TABLES = (*KERNELS, *FIXED, "rpe")


class _Clamp(torch.autograd.Function):
    """Clamped forward, straight-through backward."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor, maximum: float) -> Tensor:
        return raw.clamp(SMALLEST, maximum)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def constrained(raw: Tensor, bound: Bound, constraint: str) -> Tensor:
    """The value in effect of a stored kernel parameter."""
    if constraint == "softplus":
        if math.isinf(bound.maximum):
            return SMALLEST + F.softplus(raw)
        return bound.maximum - (bound.maximum - SMALLEST) * torch.sigmoid(-raw)
    if constraint == "project":
        return raw.clamp(SMALLEST, bound.maximum)
    return _Clamp.apply(raw, bound.maximum)


def alibi_slopes(heads: int) -> list[float]:
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return slopes + [2 ** (-4 * h / power) for h in range(1, 2 * power, 2)][: heads - power]


class PositionTables(nn.Module):
    """Owner of a kernel: gives its tables over distance, each [heads, length] or None."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        heads = config.num_attention_heads
        if config.pos_emb == "rpe":
            self.weight = nn.Parameter(torch.empty(config.rpe_num_buckets, heads))
        for name in KERNELS[config.pos_emb].parameters if config.pos_emb in KERNELS else ():
            self.register_parameter(name, nn.Parameter(torch.empty(heads)))

    def reset_parameters(self) -> None:
        """Start values of a model that is trained from scratch."""
        if self.config.pos_emb == "rpe":
            nn.init.xavier_normal_(self.weight)
        elif self.config.pos_emb in KERNELS:
            for name, bound in KERNELS[self.config.pos_emb].parameters.items():
                nn.init.uniform_(self.get_parameter(name), SMALLEST, bound.high)

    def kernel_values(self) -> Values:
        """Each kernel parameter per head, constraint applied."""
        if self.config.pos_emb not in KERNELS:
            return {}
        bounds = KERNELS[self.config.pos_emb].parameters
        return {
            name: constrained(
                self.get_parameter(name).float(), bound, self.config.kerple_constraint
            )
            for name, bound in bounds.items()
        }

    def forward(self, length: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        d = torch.arange(length, dtype=torch.float32, device=device)
        if self.config.pos_emb in KERNELS:
            return self._kernel(d)
        if self.config.pos_emb == "rpe":
            return self._t5(d), None
        if self.config.pos_emb == "sandwich":
            return self._sandwich(d), None
        slopes = torch.tensor(alibi_slopes(self.config.num_attention_heads), device=device)
        floor = SMALLEST if self.config.pos_emb == "kerple_power_original" else 0.0
        return -slopes.clamp(min=floor).unsqueeze(1) * d, None

    def _kernel(self, d: Tensor) -> tuple[Tensor | None, Tensor | None]:
        kernel = KERNELS[self.config.pos_emb]
        values = {name: value.unsqueeze(1) for name, value in self.kernel_values().items()}
        if self.config.kerple_legacy_bf16:
            d, values = d.bfloat16(), {name: value.bfloat16() for name, value in values.items()}
        bias = kernel.bias(d, values).float() if kernel.bias else None
        if bias is not None and self.config.kerple_bias_scale == "pre":
            bias = bias / math.sqrt(self.config.head_dim)
        return bias, kernel.weight(d, values).float() if kernel.weight else None

    def _t5(self, d: Tensor) -> Tensor:
        buckets, exact = self.config.rpe_num_buckets, self.config.rpe_num_buckets // 2
        growth = torch.log(d.clamp(min=1) / exact) / math.log(self.config.rpe_max_distance / exact)
        far = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
        index = torch.where(d < exact, d.long(), far)
        return self.weight.float()[index].T * math.sqrt(self.config.head_dim)

    def _sandwich(self, d: Tensor) -> Tensor:
        heads, dimension = self.config.num_attention_heads, 128
        product = torch.zeros_like(d)
        for pair in range(1, dimension // 2 + 1):
            product += torch.cos(d * 10000.0 ** (-2 * pair / dimension))
        ratio = torch.arange(1, heads + 1, device=d.device) * 8 / heads
        return (product - dimension / 2) / ratio.unsqueeze(1)


def rotary_frequencies(config: Any, device: torch.device) -> tuple[Tensor, float]:
    """Radians per position for each rotated pair, and a factor on q and k."""
    dim, base = int(config.head_dim * config.rotary_pct), config.rotary_base
    pairs = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    scaling = config.rotary_scaling
    if not scaling:
        return base**-pairs, 1.0
    factor = float(scaling["factor"])
    if scaling["type"] == "linear":
        return base**-pairs / factor, 1.0
    if scaling["type"] == "ntk":
        return (base * factor ** (dim / (dim - 2))) ** -pairs, 1.0
    original = scaling.get("original_max_position") or config.max_position_embeddings

    def turning(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(turning(32)), 0), min(math.ceil(turning(1)), dim - 1)
    ramp = ((torch.arange(dim // 2, device=device) - low) / max(high - low, 1e-3)).clamp(0, 1)
    plain = base**-pairs
    return plain * (1 - ramp) + plain / factor * ramp, 0.1 * math.log(factor) + 1.0


def rotary_angles(config: Any, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, [batch, 1, length, rotated dimensions], fp32."""
    frequencies, factor = rotary_frequencies(config, position_ids.device)
    angles = (position_ids[..., None].float() * frequencies).repeat(1, 1, 2).unsqueeze(1)
    return angles.cos() * factor, angles.sin() * factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first dimensions of x [batch, heads, length, head_dim]."""
    turned, passed = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    first, second = turned.chunk(2, -1)
    result = turned * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((result.to(x.dtype), passed), -1)


def sinusoids(position_ids: Tensor, hidden_size: int) -> Tensor:
    """All sines, then all cosines, [batch, length, hidden]."""
    pairs = torch.arange(0, hidden_size, 2, dtype=torch.float32, device=position_ids.device)
    angles = position_ids[..., None].float() * 10000.0 ** -(pairs / hidden_size)
    return torch.cat((angles.sin(), angles.cos()), -1)
