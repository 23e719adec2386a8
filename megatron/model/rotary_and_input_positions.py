"""Methods without tables: rotary, which rotates q and k, and those added to the embeddings.

Shapes: B batch, H heads, L length, D head_dim, R rotary_dim (the first R of the D dimensions).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Rope:
    """What frequencies are computed from; `length` is that of the sequence at hand."""

    dim: int
    base: float
    trained: int
    """max_position_embeddings."""
    scaling: Mapping[str, Any]
    length: int = 0
    share: float = 1.0
    """rotary_pct, where it tells how many of the dimensions turn."""

    @property
    def original(self) -> int:
        return int(self.scaling.get("original_max_position") or self.trained)

    @property
    def factor(self) -> float:
        """Without one, as Phi-3: the ratio of both lengths."""
        return float(self.scaling.get("factor") or self.trained / self.original)

    @property
    def plain(self) -> Tensor:
        return _plain(self.dim, self.base)

    def value(self, key: str, default: float) -> float:
        return float(self.scaling.get(key) or default)


def _plain(dim: int, base: float) -> Tensor:
    return base ** -(torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)


def _linear(rope: Rope) -> tuple[Tensor, float]:
    """Position interpolation (Chen et al. 2023): all positions divided by the factor."""
    return rope.plain / rope.factor, 1.0


def _ntk(rope: Rope) -> tuple[Tensor, float]:
    """NTK-aware: a larger base, so that the slowest dimension alone is divided by the factor."""
    return _plain(rope.dim, rope.base * rope.factor ** (rope.dim / (rope.dim - 2))), 1.0


def _dynamic(rope: Rope) -> tuple[Tensor, float]:
    """Dynamic NTK: the larger base of this sequence's length; the plain one up to the original."""
    stretch = rope.factor * max(rope.length, rope.original) / rope.original - (rope.factor - 1)
    return _plain(rope.dim, rope.base * stretch ** (rope.dim / (rope.dim - 2))), 1.0


def _yarn(rope: Rope) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): interpolation by wavelength, and a temperature on q and k.

    Dimensions that turn more than beta_fast times over the original length keep their frequency,
    those that turn less than beta_slow times are interpolated, with a ramp between.
    """

    def dimension_turning(turns: float) -> float:
        return (
            rope.dim * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.base))
        )

    low = dimension_turning(rope.value("beta_fast", 32.0))
    high = dimension_turning(rope.value("beta_slow", 1.0))
    if rope.scaling.get("truncate") is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = ((torch.arange(rope.dim // 2, device="cpu") - low) / max(high - low, 1e-3)).clamp(0, 1)
    plain = rope.plain
    return plain * (1 - ramp) + plain / rope.factor * ramp, _yarn_temperature(rope)


def _yarn_temperature(rope: Rope) -> float:
    """0.1 ln(factor) + 1; mscale and mscale_all_dim (DeepSeek) weigh the logarithm."""
    log = math.log(max(rope.factor, 1.0))
    scale, all_dim = rope.scaling.get("mscale"), rope.scaling.get("mscale_all_dim")
    if scale and all_dim:
        return float((0.1 * scale * log + 1.0) / (0.1 * all_dim * log + 1.0))
    return 0.1 * log + 1.0


def _longrope(rope: Rope) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024): a divisor for each frequency, others beyond the original."""
    name = "long_factor" if rope.length > rope.original else "short_factor"
    divisors = torch.tensor(rope.scaling[name], dtype=torch.float32, device="cpu")
    log = math.log(max(rope.factor, 1.0)) / math.log(rope.original)
    return rope.plain / divisors, math.sqrt(1 + log)


def _llama3(rope: Rope) -> tuple[Tensor, float]:
    """Llama 3.1: divided by the factor where a turn takes more than original / low_freq_factor
    tokens, plain where it takes less than original / high_freq_factor, with a ramp between."""
    plain = rope.plain
    low, high = float(rope.scaling["low_freq_factor"]), float(rope.scaling["high_freq_factor"])
    turns = rope.original * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / rope.factor, 1.0


def _proportional(rope: Rope) -> tuple[Tensor, float]:
    """rotary_pct of the pairs turn, with the frequencies of whole heads; the others stay."""
    turning = int(rope.share * rope.dim // 2)
    plain = rope.plain / float(rope.scaling.get("factor") or 1.0)
    return torch.where(torch.arange(len(plain), device="cpu") < turning, plain, 0.0), 1.0


def _clipped(rope: Rope) -> tuple[Tensor, float]:
    """Clipped RoPE (Li et al. 2026): the slowest pairs fade, by half a cosine, to no turn."""
    plain = rope.plain / float(rope.scaling.get("factor") or 1.0)
    fading = min(int(rope.scaling["clipped_pairs"]), len(plain))
    fade = (1 + torch.linspace(0, math.pi, fading, device="cpu").cos()) / 2
    return torch.cat((plain[: len(plain) - fading], plain[len(plain) - fading :] * fade)), 1.0


@dataclass(frozen=True)
class Scaling:
    """One value of rope_scaling's `type`, the keys that it needs and those that it may have."""

    frequencies: Callable[[Rope], tuple[Tensor, float]]
    needs: tuple[str, ...] = ("factor",)
    takes: tuple[str, ...] = ()
    by_length: bool = False
    """Whether frequencies depend on the length of the sequence."""


_TEMPERATURE = ("attention_factor", "original_max_position")
SCALINGS: dict[str, Scaling] = {
    "linear": Scaling(_linear),
    "ntk": Scaling(_ntk),
    "dynamic": Scaling(_dynamic, by_length=True),
    "yarn": Scaling(
        _yarn,
        takes=("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", *_TEMPERATURE),
    ),
    "longrope": Scaling(
        _longrope, ("short_factor", "long_factor"), ("factor", *_TEMPERATURE), by_length=True
    ),
    "llama3": Scaling(_llama3, ("factor", "low_freq_factor", "high_freq_factor")),
    "proportional": Scaling(_proportional, (), ("factor",)),
    "clipped": Scaling(_clipped, ("clipped_pairs",), ("factor",)),
}


def _checked_scaling(rope: Rope) -> Scaling:
    given = {key: value for key, value in rope.scaling.items() if value is not None}
    name = given.pop("type", None)
    if name not in SCALINGS:
        raise PositionalEmbeddingError(
            f"rope_scaling: type {name!r:.80} is not one of {', '.join(SCALINGS)}."
        )
    scaling = SCALINGS[name]
    known = {*scaling.needs, *scaling.takes, "original_max_position"}
    if unknown := sorted(set(given) - known):
        raise PositionalEmbeddingError(
            f"rope_scaling: unknown key {unknown[0]!r} of type {name}; "
            f"the keys are {', '.join(sorted(known))}."
        )
    if missing := [key for key in scaling.needs if key not in given]:
        raise PositionalEmbeddingError(f"rope_scaling: type {name} needs {missing[0]}.")
    if "factor" in given and not _is_number(given["factor"], 1):
        raise PositionalEmbeddingError(
            f"rope_scaling: factor {given['factor']!r} must be a number of at least 1 "
            "(longest length wanted / length trained on)."
        )
    for key in ("short_factor", "long_factor"):
        if key in given and len(given[key]) != rope.dim // 2:
            raise PositionalEmbeddingError(
                f"rope_scaling: {key} has {len(given[key])} numbers; heads with {rope.dim} rotated "
                f"dimensions need {rope.dim // 2}."
            )
    return scaling


def _is_number(value: Any, least: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= least


def rotary_frequencies(rope: Rope) -> tuple[Tensor, float]:
    """Radians per position for each pair of dimensions [R/2] in fp32, and a factor on q and k."""
    if not rope.scaling:
        return rope.plain, 1.0
    frequencies, factor = _checked_scaling(rope).frequencies(rope)
    return frequencies, rope.value("attention_factor", factor)


def next_power_of_two(length: int) -> int:
    """The next power of two: caches that grow token by token in generation grow seldom."""
    return 1 << max(length - 1, 0).bit_length()


def _end(options: PositionOptions, end: int, positions: Tensor | None) -> int:
    """After the last position of a sequence that ends at `end`; drawn ones may be later."""
    drawn = None if positions is None else getattr(options, "randomized_positions", None)
    return max(end, drawn or 0)


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

    def __init__(self, options: PositionOptions, share: float | None = None) -> None:
        """`share`: of the angles, where rotary stands beside another method."""
        super().__init__(options)
        self.is_beside = share is not None
        self.share = 1.0 if share is None else share
        scaling = dict(options.rope_scaling) if options.rope_scaling else {}
        whole_heads = scaling.get("type") == "proportional"
        self.rotary_dim = int(options.head_dim * (1.0 if whole_heads else options.rotary_pct))
        smallest = 4 if scaling else 2  # NTK divides by R - 2
        if self.rotary_dim % 2 or not smallest <= self.rotary_dim <= options.head_dim:
            raise PositionalEmbeddingError(
                f"rotary_pct: {options.rotary_pct} of head_dim {options.head_dim} is "
                f"{self.rotary_dim} rotated dimensions; it must be an even number from "
                f"{smallest} to {options.head_dim}."
            )
        self._rope = Rope(
            self.rotary_dim,
            options.rotary_emb_base,
            options.max_position_embeddings,
            scaling,
            share=options.rotary_pct,
        )
        frequencies, factor = rotary_frequencies(self._rope)
        # Plain attributes: module.to(bf16) would cast buffers.
        self._fixed = tuple(frequencies.tolist()), factor
        self.by_length = bool(scaling) and SCALINGS[scaling["type"]].by_length
        self._made_of: Any = None
        self._cos_LR = self._sin_LR = torch.empty(0, self.rotary_dim)

    def frequencies(self, positions: Tensor | int) -> tuple[tuple[float, ...], float]:
        """Frequencies and factor of a sequence with these positions, or of this length."""
        if not self.by_length:
            return self._shared(*self._fixed)
        length = positions if isinstance(positions, int) else int(positions.max()) + 1
        frequencies, factor = rotary_frequencies(replace(self._rope, length=length))
        return self._shared(tuple(frequencies.tolist()), factor)

    def _shared(
        self, frequencies: tuple[float, ...], factor: float
    ) -> tuple[tuple[float, ...], float]:
        """The share of the angles, and of what the factor is above 1."""
        if self.share == 1:
            return frequencies, factor
        return tuple(self.share * f for f in frequencies), 1 + self.share * (factor - 1)

    def forward(
        self,
        q_BHLD: Tensor,
        k_BHLD: Tensor,
        q_offset: int = 0,
        k_offset: int = 0,
        positions_BL: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """q and k turned; their tokens' own positions, where given, instead of the offsets'."""
        if self.share == 0:
            return q_BHLD, k_BHLD
        turned_q = self._turned(q_BHLD, q_offset, positions_BL, 1)
        return turned_q, self._turned(k_BHLD, k_offset, positions_BL, -1)

    def to_draw(self, length: int) -> dict[str, Tensor]:
        """The mean share of the pairs in a score: that of two equal vectors, over distance 0's."""
        ones = torch.ones(1, 1, length, self.options.head_dim, device=self.device)
        q, k = self(ones, ones)
        scores = (k[0, 0] @ q[0, 0, -1]).flip(0)
        return {"score of two equal vectors": scores[None] / scores[0]}

    def _turned(
        self, x_BHLD: Tensor, offset: int, positions_BL: Tensor | None, sign: int
    ) -> Tensor:
        """Queries (sign 1) or keys (sign -1)."""
        end = _end(self.options, offset + x_BHLD.shape[-2], positions_BL)
        if torch.compiler.is_exporting() and positions_BL is None:  # lengths are symbols
            places = torch.arange(offset, end, device=x_BHLD.device)
            return rotate(x_BHLD, *cos_and_sin(places, *self._shared(*self._fixed)))
        made_of = self.frequencies(end if positions_BL is None else positions_BL)
        self._grow_tables(made_of, end, x_BHLD.device)
        if positions_BL is None:
            return rotate(x_BHLD, self._cos_LR[offset:end], self._sin_LR[offset:end])
        own = positions_BL[:, None]
        return rotate(x_BHLD, self._cos_LR[own], self._sin_LR[own])

    def _grow_tables(
        self, made_of: tuple[tuple[float, ...], float], length: int, device: torch.device
    ) -> None:
        grown = self._cos_LR.shape[0] >= length and self._cos_LR.device == device
        if grown and made_of == self._made_of:
            return
        self._made_of = made_of
        self._cos_LR, self._sin_LR = _tables(*made_of, next_power_of_two(length), device)


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

    def factors(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Of q and of k at these positions, [2, *positions.shape, R]."""
        self._check_end(int(positions.max()) + 1, dtype)
        return torch.stack([xpos_factors(sign * positions, self.rotary_dim) for sign in (1, -1)])

    def _check_end(self, end: int, dtype: torch.dtype) -> None:
        # the smallest z to this power must be a normal number of the dtype, and so must 1 / it
        steepest = math.log((1 + XPOS_SHARE) / XPOS_SHARE) / XPOS_BASE
        longest = int(-math.log(torch.finfo(dtype).tiny) / steepest)
        if end > longest:
            raise PositionalEmbeddingError(
                f"pos_emb: xpos at position {end - 1}: its factors are beyond {dtype} from "
                f"position {longest} on; shorten the sequence, or use bf16 or fp32."
            )

    def _turned(
        self, x_BHLD: Tensor, offset: int, positions_BL: Tensor | None, sign: int
    ) -> Tensor:
        x_BHLD = super()._turned(x_BHLD, offset, positions_BL, sign)
        end = _end(self.options, offset + x_BHLD.shape[-2], positions_BL)
        self._check_end(end, x_BHLD.dtype)
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
        table_length = self.weight.shape[0]
        end = _end(self.options, offset + x_BLH.shape[1], positions)
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
        end = _end(self.options, offset + x_BLH.shape[1], positions)
        if self._table_LH.shape[0] < end or self._table_LH.device != x_BLH.device:
            with torch.inference_mode(False):
                everywhere = torch.arange(next_power_of_two(end), device=x_BLH.device)
                self._table_LH = sinusoids(everywhere, self.options.hidden_size)
        rows = self._table_LH[offset:end] if positions is None else self._table_LH[positions]
        return x_BLH + rows.to(x_BLH.dtype)
