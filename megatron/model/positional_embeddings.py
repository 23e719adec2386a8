"""Every `pos_emb`: one short class each, in one registry.

A positional embedding changes the input embeddings (`learned`, `sinusoidal`), rotates q and k
(`rotary`), or gives tables over distance: everything in this file. Attention sees the tables only:

    score(m, n) = (q_m . k_n) / sqrt(head_dim) * weight[h, m - n] + bias[h, m - n]

To add a kernel, derive from DistanceKernel, declare what it learns, write the formula, `@register`
it; docs/positional_embeddings.md shows how.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.errors import PositionalEmbeddingError, UnknownPositionalEmbeddingError
from megatron.model.constraints import Bounded, Exponent, Positive, Uniform, constraint_named
from megatron.model.input_positions import LearnedEmbedding, SinusoidalEmbedding
from megatron.model.position_base import (
    POSITIONAL_EMBEDDINGS,
    InputEmbedding,
    PositionalEmbedding,
    PositionOptions,
    TableEmbedding,
    Tables,
    build_positional_embedding,
    canonical_name,
    positional_embedding_class,
    register,
)
from megatron.model.rotary import RotaryEmbedding, rotary_frequencies

__all__ = [
    "POSITIONAL_EMBEDDINGS",
    "Alibi",
    "Bounded",
    "DistanceKernel",
    "Exponent",
    "InputEmbedding",
    "LearnedEmbedding",
    "NoPositionalEmbedding",
    "PositionOptions",
    "PositionalEmbedding",
    "PositionalEmbeddingError",
    "Positive",
    "RotaryEmbedding",
    "Sandwich",
    "SinusoidalEmbedding",
    "T5Bias",
    "TableEmbedding",
    "Tables",
    "Uniform",
    "UnknownPositionalEmbeddingError",
    "alibi_slopes",
    "build_positional_embedding",
    "canonical_name",
    "positional_embedding_class",
    "register",
    "rotary_frequencies",
    "t5_buckets",
]


def log1p(x: Tensor) -> Tensor:
    """log(1 + x); in bf16 the sum is rounded before the logarithm, as in the official code."""
    return torch.log1p(x) if x.dtype != torch.bfloat16 else torch.log(1 + x)


def _formula_arguments(cls: type, table: str, learnable: Mapping[str, Bounded]) -> tuple[str, ...]:
    names = tuple(inspect.signature(getattr(cls, table)).parameters)[2:]  # after self and d
    for name in names:
        if name not in learnable:
            raise PositionalEmbeddingError(
                f"{cls.__name__}.{table}() takes {name!r}, which is not in its `learnable` "
                f"({', '.join(learnable) or 'empty'}); declare it there."
            )
    return names


class DistanceKernel(TableEmbedding):
    """The KERPLE framework: one formula of distance and of learned parameters per head.

    Subclasses declare `learnable` and define `bias(self, d, ...)` or `weight(self, d, ...)` or
    both. d is [length]; each parameter named in the signature arrives as [local heads, 1], already
    inside its bounds.
    """

    learnable: ClassVar[Mapping[str, Bounded]] = {}
    official_names: ClassVar[Mapping[str, str]] = {}  # in the official code's checkpoints
    table_names: ClassVar[tuple[str, ...]] = ()
    _arguments: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.table_names = tuple(name for name in Tables._fields if hasattr(cls, name))
        cls._arguments = {
            table: _formula_arguments(cls, table, cls.learnable) for table in cls.table_names
        }

    def __init__(self, options: PositionOptions) -> None:
        super().__init__(options)
        if not self.table_names:
            raise PositionalEmbeddingError(
                f"{type(self).__name__} defines neither bias() nor weight(); write one of them."
            )
        if options.kerple_bias_scale not in ("post", "pre"):
            raise PositionalEmbeddingError(
                f"kerple_bias_scale: {options.kerple_bias_scale!r} is not one of 'post', 'pre'."
            )
        self._constraint = constraint_named(options.kerple_constraint)
        for name, spec in self.learnable.items():
            everyone = spec.init.draw(options.num_heads, options.generator(name))
            raw = self._constraint.raw(everyone[options.local_heads], spec)
            self.register_parameter(name, _head_parameter(raw, spec))

    def forward(self, length: int) -> Tables:
        values = {name: value.unsqueeze(1) for name, value in self._values().items()}
        d = self.distances(length)
        if values:
            d = d.to(next(iter(values.values())).dtype)
        if self.options.kerple_legacy_bf16:
            d, values = d.bfloat16(), {name: value.bfloat16() for name, value in values.items()}
        tables = {}
        for table, names in self._arguments.items():
            formula: Callable[..., Tensor] = getattr(self, table)
            tables[table] = _at_least_fp32(formula(d, *(values[name] for name in names)))
        if "bias" in tables and self.options.kerple_bias_scale == "pre":
            tables["bias"] = tables["bias"] / math.sqrt(self.options.head_dim)
        return Tables(**tables)

    def _values(self) -> dict[str, Tensor]:
        # In fp32 even where DeepSpeed has cast the module's parameters to bf16 or fp16.
        return {
            name: self._constraint.value(_at_least_fp32(getattr(self, name)), spec)
            for name, spec in self.learnable.items()
        }

    def kernel_values(self) -> dict[str, Tensor]:
        with torch.no_grad():
            return {name: value.detach() for name, value in self._values().items()}

    def set_kernel_values_(self, values: Mapping[str, Tensor]) -> None:
        """Store these constrained values per local head, whatever the constraint stores."""
        with torch.no_grad():
            for name, value in values.items():
                raw = self._constraint.raw(value.float().reshape(-1), self.learnable[name])
                self.get_parameter(name).copy_(raw)

    def project_(self) -> None:
        for name, spec in self.learnable.items():
            self._constraint.project_(self.get_parameter(name), spec)


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _sharded_parameter(values: Tensor, partition_dim: int) -> nn.Parameter:
    parameter = nn.Parameter(values.contiguous())
    flags = {
        "is_kernel_parameter": True,  # never weight-decayed
        "model_parallel": True,
        "tensor_model_parallel": True,
        "partition_dim": partition_dim,
    }
    for flag, value in flags.items():
        setattr(parameter, flag, value)
    return parameter


def _head_parameter(raw: Tensor, spec: Bounded) -> nn.Parameter:
    parameter = _sharded_parameter(raw, partition_dim=0)
    parameter.kernel_bounds = (spec.minimum, spec.maximum)  # type: ignore[attr-defined]
    return parameter


@register("kerple_log")
class KerpleLog(DistanceKernel):
    """The logarithmic variant, the paper's best."""

    learnable: ClassVar = {"r1": Positive(Uniform(0, 2)), "r2": Positive(Uniform(0, 1))}
    official_names: ClassVar = {"r1": "bias_p", "r2": "bias_a"}

    def bias(self, d: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
        return -r1 * log1p(r2 * d)


@register("kerple_power", aliases=["kerple_power_ap_"])
class KerplePower(DistanceKernel):
    """The power variant: ALiBi with a learned slope and exponent."""

    learnable: ClassVar = {"r1": Positive(Uniform(0, 1)), "r2": Exponent(Uniform(0, 2))}
    official_names: ClassVar = {"r1": "bias_a", "r2": "bias_p"}

    def bias(self, d: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
        return -r1 * d**r2


@register("kerple_log3")
class KerpleLog3(DistanceKernel):
    """3-para-log: the log variant with a learned exponent inside."""

    learnable: ClassVar = {
        "r1": Positive(Uniform(0, 2)),
        "r2": Positive(Uniform(0, 1)),
        "r3": Exponent(Uniform(0, 2)),
    }

    def bias(self, d: Tensor, r1: Tensor, r2: Tensor, r3: Tensor) -> Tensor:
        return -r1 * log1p(r2 * d**r3)


@register("kerple_bias_wht", aliases=["kerple_power_ap_ap"])
class KerpleBiasWeight(DistanceKernel):
    """bias+wht: the power variant, and the scores times a Gaussian-like weight."""

    learnable: ClassVar = {
        "r1": Positive(Uniform(0, 1)),
        "r2": Exponent(Uniform(0, 2)),
        "r3": Positive(Uniform(0, 1)),
        "r4": Exponent(Uniform(0, 2)),
    }
    official_names: ClassVar = {"r1": "bias_a", "r2": "bias_p", "r3": "wei_a", "r4": "wei_p"}

    def bias(self, d: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
        return -r1 * d**r2

    def weight(self, d: Tensor, r3: Tensor, r4: Tensor) -> Tensor:
        return torch.exp(-r3 * d**r4)


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


@register("gauss_wht2", aliases=["kerple_power__ap"])
class GaussWeight2(DistanceKernel):
    """2-para-wht: the same with a learned exponent."""

    learnable: ClassVar = {"r1": Positive(Uniform(0, 1)), "r2": Exponent(Uniform(0, 2))}
    official_names: ClassVar = {"r1": "wei_a", "r2": "wei_p"}

    def weight(self, d: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
        return torch.exp(-r1 * d**r2)


def alibi_slopes(num_heads: int) -> list[float]:
    """2^(-8h/H) for H a power of two; else those of the power of two below, then every other
    slope of the next one until there are enough (Press et al. 2022)."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power, 2)]
    return slopes + between[: num_heads - power]


@register("alibi")
class Alibi(TableEmbedding):
    """-slope * d with fixed slopes, in fp32."""

    smallest_slope = 0.0

    def forward(self, length: int) -> Tables:
        slopes = alibi_slopes(self.options.num_heads)[self.options.local_heads]
        slope_per_head = torch.tensor(slopes, device=self.device).clamp(min=self.smallest_slope)
        return Tables(bias=-slope_per_head.unsqueeze(1) * self.distances(length))


@register("kerple_power_original")
class AlibiFloored(Alibi):
    """The official code's name for ALiBi inside its power kernel: slopes are at least 0.01."""

    smallest_slope = 0.01


def t5_buckets(d: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """The bucket of each distance: half of them hold one distance, the rest grow as its log."""
    exact = num_buckets // 2
    logarithmic = torch.log(d.clamp(min=1) / exact) / math.log(max_distance / exact)
    far = exact + (logarithmic * (num_buckets - exact)).long()
    return torch.where(d < exact, d.long(), far.clamp(max=num_buckets - 1))


@register("rpe")
class T5Bias(TableEmbedding):
    """T5's bias: a learned value per bucket and head, times sqrt(head_dim) as in NeoX."""

    def __init__(self, options: PositionOptions) -> None:
        super().__init__(options)
        buckets = options.rpe_num_buckets
        if buckets < 2 or options.rpe_max_distance <= buckets // 2:
            raise PositionalEmbeddingError(
                f"rpe_num_buckets: {buckets} with rpe_max_distance: {options.rpe_max_distance}; "
                "there must be at least 2 buckets and rpe_max_distance above half their number."
            )
        everyone = torch.empty(buckets, options.num_heads)
        nn.init.xavier_normal_(everyone, generator=options.generator("rpe.weight"))
        self.weight = _sharded_parameter(everyone[:, options.local_heads], partition_dim=1)

    def forward(self, length: int) -> Tables:
        buckets = t5_buckets(
            self.distances(length), self.options.rpe_num_buckets, self.options.rpe_max_distance
        )
        values = F.embedding(buckets, _at_least_fp32(self.weight)).T
        return Tables(bias=values * math.sqrt(self.options.head_dim))


@register("sandwich")
class Sandwich(TableEmbedding):
    """Chi et al. 2023: the inner product of sinusoidal embeddings, flatter for each next head."""

    dimension = 128  # the paper's choice, independent of the model's width

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
