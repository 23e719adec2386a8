"""Normalisation layers and activations by their GPT-NeoX names: torch only, since an export to
Hugging Face takes this file along.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from apex.normalization import FusedLayerNorm as _FusedLayerNorm
except ImportError:
    _FusedLayerNorm = None


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
GATED: dict[str, Activation] = {"geglu": F.gelu, "swiglu": F.silu, "reglu": F.relu}


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

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(1))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True).clamp(min=self.eps) * self.g


class RMSNorm(nn.Module):
    """x / rms(x), times a learned scale; the mean square is taken in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), self.scale.shape, self.scale.float(), self.eps)
        return normed.to(x.dtype)


def _layer_norm(size: int, eps: float, bias: bool) -> nn.Module:
    if _FusedLayerNorm is not None and torch.cuda.is_available() and bias:
        return _FusedLayerNorm(size, eps=eps)
    return nn.LayerNorm(size, eps=eps, bias=bias)


def build_norm(
    name: str,
    size: int,
    *,
    layernorm_epsilon: float = 1e-5,
    rms_norm_epsilon: float = 1e-8,
    scalenorm_epsilon: float = 1e-8,
    bias: bool = True,
) -> nn.Module:
    """The norm called `name`."""
    factories: dict[str, Callable[[], nn.Module]] = {
        "layernorm": lambda: _layer_norm(size, layernorm_epsilon, bias),
        "rmsnorm": lambda: RMSNorm(size, rms_norm_epsilon),
        "scalenorm": lambda: ScaleNorm(size, scalenorm_epsilon),
    }
    if name not in factories:
        raise ValueError(f"norm {name!r} is unknown; choose one of {', '.join(factories)}")
    return factories[name]()
