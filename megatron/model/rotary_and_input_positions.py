"""Methods without tables: rotary, which rotates q and k, and those added to the embeddings.

Shapes: B batch, H heads, L length, D head_dim, R rotary_dim (the first R of the D dimensions).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from .position_base import (
    PositionalEmbedding,
    PositionalEmbeddingError,
    PositionOptions,
    register,
)

# YaRN (Peng et al. 2023): dimensions that turn more than 32 times over the original length keep
# their frequency, those that turn less than once are interpolated, with a ramp between.
YARN_FAST_TURNS, YARN_SLOW_TURNS = 32.0, 1.0


def _plain(dim: int, base: float) -> Tensor:
    return base ** -(torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)


def _linear(dim: int, base: float, factor: float, original: int) -> tuple[Tensor, float]:
    """Position interpolation (Chen et al. 2023): all positions divided by the factor."""
    return _plain(dim, base) / factor, 1.0


def _ntk(dim: int, base: float, factor: float, original: int) -> tuple[Tensor, float]:
    """NTK-aware: a larger base, so that the slowest dimension alone is divided by the factor."""
    return _plain(dim, base * factor ** (dim / (dim - 2))), 1.0


def _yarn(dim: int, base: float, factor: float, original: int) -> tuple[Tensor, float]:
    """YaRN: interpolation by wavelength, and a temperature of 0.1 ln(factor) + 1 on q and k."""

    def dimension_turning(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension_turning(YARN_FAST_TURNS)), 0)
    high = min(math.ceil(dimension_turning(YARN_SLOW_TURNS)), dim - 1)
    ramp = ((torch.arange(dim // 2, device="cpu") - low) / max(high - low, 1e-3)).clamp(0, 1)
    plain = _plain(dim, base)
    return plain * (1 - ramp) + plain / factor * ramp, 0.1 * math.log(factor) + 1.0


Scaling = Callable[[int, float, float, int], tuple[Tensor, float]]
SCALINGS: dict[str, Scaling] = {"linear": _linear, "ntk": _ntk, "yarn": _yarn}
SCALING_KEYS = frozenset({"type", "factor", "original_max_position"})


def _checked_scaling(scaling: Mapping[str, Any]) -> tuple[Scaling, float]:
    unknown = sorted(set(scaling) - SCALING_KEYS)
    if unknown:
        raise PositionalEmbeddingError(
            f"rope_scaling: unknown key {unknown[0]!r}; "
            f"the keys are {', '.join(sorted(SCALING_KEYS))}."
        )
    if scaling.get("type") not in SCALINGS:
        raise PositionalEmbeddingError(
            f"rope_scaling: type {scaling.get('type')!r} is not one of {', '.join(SCALINGS)}."
        )
    factor = scaling.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor >= 1:
        raise PositionalEmbeddingError(
            f"rope_scaling: factor {factor!r} must be a number of at least 1 "
            "(longest length wanted / length trained on)."
        )
    return SCALINGS[scaling["type"]], float(factor)


def rotary_frequencies(
    rotary_dim: int, base: float, scaling: Mapping[str, Any] | None, max_position: int
) -> tuple[Tensor, float]:
    """Radians per position for each pair of dimensions [R/2] in fp32, and a factor on q and k."""
    if scaling is None:
        return _plain(rotary_dim, base), 1.0
    scale, factor = _checked_scaling(scaling)
    original = scaling.get("original_max_position") or max_position
    return scale(rotary_dim, base, factor, int(original))


def next_power_of_two(length: int) -> int:
    """The next power of two: caches that grow token by token in generation grow seldom."""
    return 1 << max(length - 1, 0).bit_length()


def cos_and_sin(
    positions: Tensor, frequencies: Sequence[float], factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * frequency in fp32, [*positions.shape, R]: each angle twice."""
    pairs = torch.tensor(frequencies, dtype=torch.float32, device=positions.device)
    angles = positions[..., None].float() * pairs
    angles = torch.cat((angles, angles), -1)
    return angles.cos() * factor, angles.sin() * factor


@lru_cache(maxsize=1)  # the layers of a model ask for the same tables one after the other
def _tables(
    frequencies: tuple[float, ...], factor: float, length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin of all positions below `length`, each [length, R]."""
    # Tables that evaluation made must serve training too.
    with torch.inference_mode(False), torch.no_grad():
        return cos_and_sin(torch.arange(length, device=device), frequencies, factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first R dimensions of x [..., L, D] by angles [..., L, R]."""
    rotary_dim = cos.shape[-1]
    turned, passed = x.split([rotary_dim, x.shape[-1] - rotary_dim], -1)
    first, second = turned.chunk(2, -1)
    swapped = torch.cat((-second, first), -1)
    result = (turned * cos + swapped * sin).to(x.dtype)
    return result if passed.shape[-1] == 0 else torch.cat((result, passed), -1)


@register("rotary")
class RotaryEmbedding(PositionalEmbedding):
    """Su et al. 2021: dimension i pairs with i + R/2, turned by position * base^(-2i/R).

    Angles are fp32 whatever the model's precision: in bf16 they are off by radians.
    """

    kind = "rotation"

    def __init__(self, options: PositionOptions) -> None:
        super().__init__(options)
        self.rotary_dim = int(options.head_dim * options.rotary_pct)
        smallest = 4 if options.rope_scaling else 2  # NTK divides by R - 2
        if self.rotary_dim % 2 or not smallest <= self.rotary_dim <= options.head_dim:
            raise PositionalEmbeddingError(
                f"rotary_pct: {options.rotary_pct} of head_dim {options.head_dim} is "
                f"{self.rotary_dim} rotated dimensions; it must be an even number from "
                f"{smallest} to {options.head_dim}."
            )
        frequencies, self.attention_factor = rotary_frequencies(
            self.rotary_dim,
            options.rotary_emb_base,
            dict(options.rope_scaling) if options.rope_scaling else None,
            options.max_position_embeddings,
        )
        # Plain attributes: module.to(bf16) would cast buffers.
        self.frequencies = tuple(frequencies.tolist())
        self._cos_LR = self._sin_LR = torch.empty(0, self.rotary_dim)

    def forward(
        self,
        q_BHLD: Tensor,
        k_BHLD: Tensor,
        q_offset: int = 0,
        k_offset: int = 0,
        positions_BL: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """q and k turned; their tokens' own positions, where given, instead of the offsets'."""
        turned_q = self._rotate(q_BHLD, q_offset, positions_BL)
        return turned_q, self._rotate(k_BHLD, k_offset, positions_BL)

    def _rotate(self, x_BHLD: Tensor, offset: int, positions_BL: Tensor | None) -> Tensor:
        end = offset + x_BHLD.shape[-2]
        self._grow_tables(end, x_BHLD.device)
        if positions_BL is None:
            return rotate(x_BHLD, self._cos_LR[offset:end], self._sin_LR[offset:end])
        own = positions_BL[:, None]
        return rotate(x_BHLD, self._cos_LR[own], self._sin_LR[own])

    def _grow_tables(self, length: int, device: torch.device) -> None:
        if self._cos_LR.shape[0] >= length and self._cos_LR.device == device:
            return
        self._cos_LR, self._sin_LR = _tables(
            self.frequencies, self.attention_factor, next_power_of_two(length), device
        )


XPOS_BASE = 512  # positions after which a pair's factor is taken once more
XPOS_SHARE = 0.4


def xpos_factors(positions: Tensor, rotary_dim: int) -> Tensor:
    """z^(position / 512) in fp32, [*positions.shape, R]; z of pair i is (2i/R + 0.4) / 1.4."""
    pairs = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=positions.device)
    logs = ((pairs / rotary_dim + XPOS_SHARE) / (1 + XPOS_SHARE)).log()
    factors = (positions[..., None].float() / XPOS_BASE * logs).exp()
    return torch.cat((factors, factors), -1)


@register("xpos")
class XPos(RotaryEmbedding):
    """Sun et al. 2022: rotary, and q of pair i times z^(m / 512), k times z^(-n / 512).

    So a score decays as z^(d / 512), fastest for the pairs that turn fastest.
    """

    def forward(
        self,
        q_BHLD: Tensor,
        k_BHLD: Tensor,
        q_offset: int = 0,
        k_offset: int = 0,
        positions_BL: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        q_BHLD, k_BHLD = super().forward(q_BHLD, k_BHLD, q_offset, k_offset, positions_BL)
        scaled_q = self._scaled(q_BHLD, q_offset, positions_BL, 1)
        return scaled_q, self._scaled(k_BHLD, k_offset, positions_BL, -1)

    def _scaled(
        self, x_BHLD: Tensor, offset: int, positions_BL: Tensor | None, sign: int
    ) -> Tensor:
        end = offset + x_BHLD.shape[-2]
        # the smallest z to this power must be a normal number of the dtype, and so must 1 / it
        steepest = math.log((1 + XPOS_SHARE) / XPOS_SHARE) / XPOS_BASE
        longest = int(-math.log(torch.finfo(x_BHLD.dtype).tiny) / steepest)
        if end > longest:
            raise PositionalEmbeddingError(
                f"pos_emb: xpos at position {end - 1}: its factors are beyond {x_BHLD.dtype} from "
                f"position {longest} on; shorten the sequence, or use bf16 or fp32."
            )
        if positions_BL is None:
            places = torch.arange(offset, end, device=x_BHLD.device)
        else:
            places = positions_BL[:, None]
        factors = xpos_factors(sign * places, self.rotary_dim)
        turned, passed = x_BHLD.tensor_split([self.rotary_dim], -1)
        return torch.cat(((turned * factors).to(x_BHLD.dtype), passed), -1)


# Absolute positional embeddings, added to the token embeddings x_BLH (batch, length, hidden).


class InputEmbedding(PositionalEmbedding):
    """Adds something to the token embeddings x_BLH; position `offset` is the first of them.

    With `reset_position_ids`, `positions` [B, L] tells each token's own position.
    """

    kind = "input"

    def forward(self, x_BLH: Tensor, offset: int = 0, positions: Tensor | None = None) -> Tensor:
        raise NotImplementedError


def sinusoids(positions: Tensor, hidden_size: int, base: float = 10000.0) -> Tensor:
    """All sines, then all cosines, of fp32 angles: [*positions.shape, hidden_size]."""
    pairs = torch.arange(0, hidden_size, 2, dtype=torch.float32, device=positions.device)
    angles = positions[..., None].float() * base ** -(pairs / hidden_size)
    return torch.cat((angles.sin(), angles.cos()), -1)


@register("learned")
class LearnedEmbedding(InputEmbedding):
    """One learned vector per position; there is none beyond max_position_embeddings."""

    def __init__(self, options: PositionOptions) -> None:
        super().__init__(options)
        shape = (options.max_position_embeddings, options.hidden_size)
        values = torch.randn(shape, generator=options.generator("position_embeddings"))
        self.weight = nn.Parameter(values * options.init_method_std)

    def forward(self, x_BLH: Tensor, offset: int = 0, positions: Tensor | None = None) -> Tensor:
        end, table_length = offset + x_BLH.shape[1], self.weight.shape[0]
        if end > table_length:
            raise PositionalEmbeddingError(
                f"pos_emb: learned has vectors for {table_length} positions "
                f"(max_position_embeddings), but position {end - 1} was asked for; shorten the "
                "sequence, train with a larger max_position_embeddings, or use a positional "
                "embedding that extrapolates, such as kerple_log."
            )
        rows = self.weight[offset:end] if positions is None else self.weight[positions]
        return x_BLH + rows.to(x_BLH.dtype)


@register("sinusoidal")
class SinusoidalEmbedding(InputEmbedding):
    """Vaswani et al. 2017 in NeoX's layout: all sines, then all cosines, of fp32 angles."""

    def __init__(self, options: PositionOptions) -> None:
        super().__init__(options)
        if options.hidden_size % 2:
            raise PositionalEmbeddingError(
                f"pos_emb: sinusoidal needs an even hidden_size, got {options.hidden_size}."
            )
        self._table_LH = torch.empty(0, options.hidden_size)

    def forward(self, x_BLH: Tensor, offset: int = 0, positions: Tensor | None = None) -> Tensor:
        end = offset + x_BLH.shape[1]
        if self._table_LH.shape[0] < end or self._table_LH.device != x_BLH.device:
            with torch.inference_mode(False):
                everywhere = torch.arange(next_power_of_two(end), device=x_BLH.device)
                self._table_LH = sinusoids(everywhere, self.options.hidden_size)
        rows = self._table_LH[offset:end] if positions is None else self._table_LH[positions]
        return x_BLH + rows.to(x_BLH.dtype)
