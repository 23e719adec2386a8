"""Learned kernel parameters: how they start, and how they are kept inside their bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.errors import PositionalEmbeddingError

__all__ = ["CONSTRAINTS", "Bounded", "Exponent", "Positive", "Uniform", "constraint_named"]

SMALLEST = 0.01  # the official code's lower bound of every kernel parameter


@dataclass(frozen=True)
class Uniform:
    """Initial values, uniform in [low, high)."""

    low: float
    high: float

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        return self.low + (self.high - self.low) * torch.rand(count, generator=generator)


@dataclass(frozen=True)
class Bounded:
    """One kernel parameter, a value per head in [minimum, maximum]."""

    init: Uniform
    minimum: float = SMALLEST
    maximum: float = math.inf

    def clamp(self, value: Tensor) -> Tensor:
        return value.clamp(self.minimum, self.maximum)


@dataclass(frozen=True)
class Positive(Bounded):
    """r > 0."""


@dataclass(frozen=True)
class Exponent(Bounded):
    """0 < r <= 2: beyond 2 the kernels are not conditionally positive definite (Prop. 1)."""

    maximum: float = 2.0


class Constraint(Protocol):
    """How a stored parameter (raw) relates to the value the formula sees."""

    def value(self, raw: Tensor, spec: Bounded) -> Tensor:
        """The value inside the bounds, differentiable in raw."""

    def raw(self, value: Tensor, spec: Bounded) -> Tensor:
        """What to store for that value."""

    def project_(self, raw: Tensor, spec: Bounded) -> None:
        """After an optimizer step."""


class _ClampStraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, raw: Tensor, minimum: float, maximum: float) -> Tensor:
        return raw.clamp(minimum, maximum)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


class StraightThrough:
    """Clamped in the forward, gradient as if it were not: what the official code amounts to.

    The official code clamps the low-precision copy and lets the optimizer move the fp32 master
    weight freely, so a parameter below its bound can come back.
    """

    def value(self, raw: Tensor, spec: Bounded) -> Tensor:
        return _ClampStraightThrough.apply(raw, spec.minimum, spec.maximum)

    def raw(self, value: Tensor, spec: Bounded) -> Tensor:
        return value.clone()

    def project_(self, raw: Tensor, spec: Bounded) -> None:
        return


class Projected:
    """Projected gradient descent: plain gradient, clamped in place after each step."""

    def value(self, raw: Tensor, spec: Bounded) -> Tensor:
        # Inside the bounds this is the identity; a checkpoint may hold values outside.
        return spec.clamp(raw)

    def raw(self, value: Tensor, spec: Bounded) -> Tensor:
        return spec.clamp(value)

    def project_(self, raw: Tensor, spec: Bounded) -> None:
        with torch.no_grad():
            raw.clamp_(spec.minimum, spec.maximum)


class Smooth:
    """Softplus for r > 0, a scaled sigmoid where there is an upper bound: never clamped."""

    margin = 1e-4  # a value on the bound would need an infinite raw parameter

    def value(self, raw: Tensor, spec: Bounded) -> Tensor:
        if math.isinf(spec.maximum):
            return spec.minimum + F.softplus(raw)
        # Written from the upper bound down, so that rounding can never pass it.
        return spec.maximum - (spec.maximum - spec.minimum) * torch.sigmoid(-raw)

    def raw(self, value: Tensor, spec: Bounded) -> Tensor:
        if math.isinf(spec.maximum):
            excess = (value - spec.minimum).clamp(min=self.margin)
            return excess + torch.log(-torch.expm1(-excess))
        share = (value - spec.minimum) / (spec.maximum - spec.minimum)
        return torch.logit(share, eps=self.margin)

    def project_(self, raw: Tensor, spec: Bounded) -> None:
        return


CONSTRAINTS: Mapping[str, Constraint] = MappingProxyType(
    {"ste": StraightThrough(), "project": Projected(), "softplus": Smooth()}
)


def constraint_named(name: str) -> Constraint:
    """The constraint behind `kerple_constraint: <name>`."""
    if name not in CONSTRAINTS:
        raise PositionalEmbeddingError(
            f"kerple_constraint: {name!r} is not one of {', '.join(map(repr, CONSTRAINTS))}."
        )
    return CONSTRAINTS[name]
