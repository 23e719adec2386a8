"""Positions as functions of distance: the paper's kernels, then the baselines it compares with.

    score(m, n) = (q_m . k_n) / sqrt(head_dim) * weight(d) + bias(d),        d = m - n >= 0

Each class is one formula with learned numbers r1, r2, ... per head, shared by all layers. Beside
each number stand its constraint and its initial draw: `Positive(Uniform(0, 2))` starts uniform in
[0, 2) and stays above 0; an `Exponent` stays in (0, 2]. The paper states the constraints, the
official code the draws; `official` has its names. Numbers of equations, sections and facts are
the paper's:

    Chi, Fan, Ramadge, Rudnicky: KERPLE: Kernelized Relative Positional Embedding for Length
    Extrapolation. NeurIPS 2022.

Why these formulas: a bias kernel must be conditionally positive definite (CPD). Adding a large
enough constant c makes it an inner product (Lemma 1, Eq. 3), and softmax cancels c (Eq. 2), so that
no formula here has one. `megatron/model/kernel_theory.py` checks CPD and searches for c.
Eq. 1 divides the bias by sqrt(head_dim) too: `kerple_bias_scale: pre`.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .position_base import (
    Bounded,
    DistanceKernel,
    Exponent,
    PositionalEmbedding,
    PositionalEmbeddingError,
    PositionOptions,
    Positive,
    TableEmbedding,
    Tables,
    Uniform,
    at_least_fp32,
    log1p,
    register,
    sharded_parameter,
)

# KERPLE, Section 4: the two variants of the main results. Eq. 4 with bias kernels of Corollary 1.


@register("kerple_log")
class KerpleLog(DistanceKernel):
    """The logarithmic variant, the paper's best. CPD by Corollary 1(b) with p = 1."""

    learnable: ClassVar = {"r1": Positive(Uniform(0, 2)), "r2": Positive(Uniform(0, 1))}
    official: ClassVar = {"r1": "bias_p", "r2": "bias_a"}
    scale = "r1"

    def bias(self, d: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
        return -r1 * log1p(r2 * d)


@register("kerple_power")
class KerplePower(DistanceKernel):
    """The power variant: ALiBi with a learned slope and exponent. CPD by Corollary 1(a)."""

    learnable: ClassVar = {"r1": Positive(Uniform(0, 1)), "r2": Exponent(Uniform(0, 2))}
    official: ClassVar = {"r1": "bias_a", "r2": "bias_p"}
    scale = "r1"

    def bias(self, d: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
        return -r1 * d**r2


# Section 5.3: more complicated kernels.


@register("kerple_log3")
class KerpleLog3(DistanceKernel):
    """3-para-log: an exponent inside the logarithm. CPD by Corollary 1(b); Figure 1 shows it."""

    learnable: ClassVar = {
        "r1": Positive(Uniform(0, 2)),
        "r2": Positive(Uniform(0, 1)),
        "r3": Exponent(Uniform(0, 2)),
    }
    scale = "r1"

    def bias(self, d: Tensor, r1: Tensor, r2: Tensor, r3: Tensor) -> Tensor:
        return -r1 * log1p(r2 * d**r3)


@register("kerple_bias_wht")
class KerpleBiasWeight(DistanceKernel):
    """bias+wht: the power variant, and scores times a weight that is positive definite (Fact 5)."""

    learnable: ClassVar = {
        "r1": Positive(Uniform(0, 1)),
        "r2": Exponent(Uniform(0, 2)),
        "r3": Positive(Uniform(0, 1)),
        "r4": Exponent(Uniform(0, 2)),
    }
    official: ClassVar = {"r1": "bias_a", "r2": "bias_p", "r3": "wei_a", "r4": "wei_p"}

    def bias(self, d: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
        return -r1 * d**r2

    def weight(self, d: Tensor, r3: Tensor, r4: Tensor) -> Tensor:
        return torch.exp(-r3 * d**r4)


# Appendix A.3: Gaussian-like kernels, positive definite and bounded (Fact 5), that do not
# extrapolate as well.


@register("gauss_bias2")
class GaussBias2(DistanceKernel):
    """2-para-bias: a Gaussian bump around the query."""

    learnable: ClassVar = {"r1": Positive(Uniform(0, 1)), "r2": Positive(Uniform(0, 1))}

    def bias(self, d: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
        return r1 * torch.exp(-r2 * d**2)


@register("gauss_bias3")
class GaussBias3(DistanceKernel):
    """3-para-bias: the same with a learned exponent."""

    learnable: ClassVar = {
        "r1": Positive(Uniform(0, 1)),
        "r2": Positive(Uniform(0, 1)),
        "r3": Exponent(Uniform(0, 2)),
    }

    def bias(self, d: Tensor, r1: Tensor, r2: Tensor, r3: Tensor) -> Tensor:
        return r1 * torch.exp(-r2 * d**r3)


@register("gauss_wht1")
class GaussWeight1(DistanceKernel):
    """1-para-wht: scores times a Gaussian."""

    learnable: ClassVar = {"r1": Positive(Uniform(0, 1))}

    def weight(self, d: Tensor, r1: Tensor) -> Tensor:
        return torch.exp(-r1 * d**2)


@register("gauss_wht2")
class GaussWeight2(DistanceKernel):
    """2-para-wht: the same with a learned exponent."""

    learnable: ClassVar = {"r1": Positive(Uniform(0, 1)), "r2": Exponent(Uniform(0, 2))}
    official: ClassVar = {"r1": "wei_a", "r2": "wei_p"}

    def weight(self, d: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
        return torch.exp(-r1 * d**r2)


# Baselines with tables. Methods without are in rotary_and_input_positions.py.


def alibi_slopes(num_heads: int) -> list[float]:
    """2^(-8h/H) for H a power of two; else those of the power of two below, then every other
    slope of the next one until there are enough (Press et al. 2022)."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power, 2)]
    return slopes + between[: num_heads - power]


@register("alibi")
class Alibi(TableEmbedding):
    """-slope * d with fixed slopes: the bias kernel c - |m - n| of Section 4, connection to prior
    work. CPD by Corollary 1(a) with p = 1."""

    smallest_slope = 0.0

    def forward(self, length: int) -> Tables:
        slopes = alibi_slopes(self.options.num_heads)[self.options.local_heads]
        slope_per_head = torch.tensor(slopes, device=self.device).clamp(min=self.smallest_slope)
        return Tables(bias=-slope_per_head.unsqueeze(1) * self.distances(length))


class AlibiSlopes:
    """Initial values: ALiBi's slopes, nothing random."""

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.tensor(alibi_slopes(count))


@register("alibi_learned")
class AlibiLearned(DistanceKernel):
    """ALiBi whose slopes are trained: the power variant with its exponent held at 1."""

    # ALiBi's flattest slope is 2^-8, below the bound that the official code gives its kernels
    learnable: ClassVar = {"r1": Positive(AlibiSlopes(), minimum=1e-4)}
    scale = "r1"

    def bias(self, d: Tensor, r1: Tensor) -> Tensor:
        return -r1 * d


@register("kerple_power_original")
class AlibiFloored(Alibi):
    """The official code's name for ALiBi inside its power kernel: slopes are at least 0.01."""

    smallest_slope = 0.01


class Constant:
    """Initial values: one number for all heads, nothing random."""

    def __init__(self, value: float) -> None:
        self.value = value

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.full((count,), self.value)


class LogAlibiSlopes(AlibiSlopes):
    """Initial values: the logarithms of ALiBi's slopes."""

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        return super().draw(count, generator).log()


@register("bam")
class Bam(DistanceKernel):
    """BAM's generalised Gaussian prior (Bianchessi et al. 2025), located at distance 0.

    The power variant with a slope that is stored as its logarithm and an exponent up to 4; no CPD
    kernel above 2. It starts as ALiBi. The authors have no bounds; these keep every table finite.
    """

    learnable: ClassVar = {
        "r1": Bounded(LogAlibiSlopes(), minimum=-10.0, maximum=4.0),
        "r2": Bounded(Constant(1.0), maximum=4.0),
    }

    def bias(self, d: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
        return -torch.exp(r1) * (d + 1e-5) ** r2


@register("ape")
class Ape(DistanceKernel):
    """APE's decay bias and distance temperature (Vetcha 2026, arXiv 2601.06113).

    Read in a summary of the paper; the authors' code and starting values were not found. Its
    rotation by the entropy of attention is left out: no score is known before all of its row are.
    The bias is CPD, as a sum of kernels of Corollary 1; the weight is PD.
    """

    learnable: ClassVar = {
        "r1": Bounded(AlibiSlopes(), minimum=0.0),
        "r2": Bounded(Uniform(0, 1), minimum=0.0),
        "r3": Bounded(Uniform(0, 1), minimum=0.0),
        "r4": Bounded(Uniform(0, 0.01), minimum=0.0),
    }

    def bias(self, d: Tensor, r1: Tensor, r2: Tensor, r3: Tensor) -> Tensor:
        # the square root's slope is infinite at 0, where only r3's gradient is taken
        return -(r1 * d + r2 * log1p(d) + r3 * d.sqrt())

    def weight(self, d: Tensor, r4: Tensor) -> Tensor:
        return 1 / (1 + r4 * d)


def t5_buckets(d: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """The bucket of each distance: half of them hold one distance, the rest grow as its log.

    Section 4 prints this formula without the first term of `far`, which its code has.
    """
    exact = num_buckets // 2
    logarithmic = torch.log(d.clamp(min=1) / exact) / math.log(max_distance / exact)
    far = exact + (logarithmic * (num_buckets - exact)).long()
    return torch.where(d < exact, d.long(), far.clamp(max=num_buckets - 1))


@register("rpe")
class T5Bias(TableEmbedding):
    """T5's bias: a learned value per bucket and head, times sqrt(head_dim) as in NeoX.

    Starts normal with Xavier's variance; not CPD in general.
    """

    def __init__(self, options: PositionOptions) -> None:
        super().__init__(options)
        self.buckets, self.max_distance = options.rpe_num_buckets, options.rpe_max_distance
        if self.buckets < 2 or self.max_distance <= self.buckets // 2:
            raise PositionalEmbeddingError(
                f"rpe_num_buckets: {self.buckets} with rpe_max_distance: {self.max_distance}; "
                "there must be at least 2 buckets and rpe_max_distance above half their number."
            )
        self.scale = math.sqrt(options.head_dim)
        values = self.initial_values()["weight"]
        self.weight = sharded_parameter(values, split=1, official="weight")

    def initial_values(self) -> dict[str, Tensor]:
        heads = self.options.num_heads
        everyone = torch.empty(self.buckets, heads, device="cpu")
        std = math.sqrt(2.0 / (self.buckets + heads))
        everyone.normal_(0, std, generator=self.options.generator("rpe.weight"))
        return {"weight": everyone[:, self.options.local_heads]}

    def forward(self, length: int) -> Tables:
        bucket = t5_buckets(self.distances(length), self.buckets, self.max_distance)
        return Tables(bias=F.embedding(bucket, at_least_fp32(self.weight)).T * self.scale)


@register("sandwich")
class Sandwich(TableEmbedding):
    """The inner product of sinusoidal embeddings, flatter for each next head (Chi et al. 2023)."""

    dimension = 128  # their choice, independent of the model's width

    def forward(self, length: int) -> Tables:
        pairs = torch.arange(1, self.dimension // 2 + 1, device=self.device)
        frequencies = 10000.0 ** (-2 * pairs / self.dimension)
        d = self.distances(length)
        product = torch.zeros_like(d)
        for frequency in frequencies:  # one by one: a [length, 64] table is never held
            product += torch.cos(d * frequency)
        heads = torch.arange(1, self.options.num_heads + 1, device=self.device)
        ratio = (heads * 8 / self.options.num_heads)[self.options.local_heads]
        return Tables(bias=(product - self.dimension / 2) / ratio.unsqueeze(1))


@register("none")
class NoPositionalEmbedding(PositionalEmbedding):
    """NoPE: the causal mask alone tells positions apart."""

    kind = "none"

    def forward(self, length: int) -> Tables:
        return Tables()
