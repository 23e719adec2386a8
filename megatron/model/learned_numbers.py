"""A kernel's learned numbers: how they start, their bounds, and the constraints that keep these.

This file travels with every exported model, beside the formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    if __package__ != "megatron.model":  # beside an exported model nothing of ours is looked for
        raise ImportError
    from megatron.errors import PositionalEmbeddingError as PositionalEmbeddingError
except ImportError:

    class PositionalEmbeddingError(ValueError):  # type: ignore[no-redef]
        """A positional embedding cannot be built with these options."""


SMALLEST = 0.01  # the official code's lower bound of every kernel parameter


class InitialValues(Protocol):
    """How a parameter starts: a value for each head of the whole model."""

    def draw(self, count: int, generator: torch.Generator) -> Tensor: ...


@dataclass(frozen=True)
class Uniform:
    """Initial values, uniform in [low, high)."""

    low: float
    high: float

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        random = torch.rand(count, generator=generator, device="cpu")
        return self.low + (self.high - self.low) * random


@dataclass(frozen=True)
class Bounded:
    """One kernel parameter, a value per head in [minimum, maximum]."""

    init: InitialValues
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


def at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def log1p(x: Tensor) -> Tensor:
    """log(1 + x); in bf16 the sum is rounded before the logarithm, as in the official code."""
    return torch.log1p(x) if x.dtype != torch.bfloat16 else torch.log(1 + x)


def sharded_parameter(values: Tensor) -> nn.Parameter:
    """A kernel's parameter, which `weight_decay` leaves alone; it holds this rank's heads."""
    # Exported models are built on the meta device before their weights are read.
    parameter = nn.Parameter(values.contiguous().to(torch.get_default_device()))
    for flag in ("is_kernel_parameter", "model_parallel", "tensor_model_parallel"):
        setattr(parameter, flag, True)
    return parameter


class Constraint:
    """How a stored number (raw) relates to the value that the formula sees."""

    def value(self, raw: Tensor, spec: Bounded) -> Tensor:
        """The value inside the bounds, differentiable in raw."""
        raise NotImplementedError

    def raw(self, value: Tensor, spec: Bounded) -> Tensor:
        """What to store for that value."""
        return value.clone()

    def project_(self, raw: Tensor, spec: Bounded) -> None:
        """After an optimizer step."""


class _ClampStraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, raw: Tensor, minimum: float, maximum: float) -> Tensor:
        return raw.clamp(minimum, maximum)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


class StraightThrough(Constraint):
    """Clamped in the forward, gradient as if it were not: what the official code amounts to.

    The official code clamps the low-precision copy and lets the optimizer move the fp32 master
    weight freely, so a parameter below its bound can come back.
    """

    def value(self, raw: Tensor, spec: Bounded) -> Tensor:
        return _ClampStraightThrough.apply(raw, spec.minimum, spec.maximum)


class Projected(Constraint):
    """Projected gradient descent: plain gradient, clamped in place after each step."""

    def value(self, raw: Tensor, spec: Bounded) -> Tensor:
        # Inside the bounds this is the identity; a checkpoint may hold values outside.
        return spec.clamp(raw)

    def raw(self, value: Tensor, spec: Bounded) -> Tensor:
        return spec.clamp(value)

    def project_(self, raw: Tensor, spec: Bounded) -> None:
        with torch.no_grad():
            raw.clamp_(spec.minimum, spec.maximum)


class Smooth(Constraint):
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


CONSTRAINTS: dict[str, Constraint] = {
    "ste": StraightThrough(),
    "project": Projected(),
    "softplus": Smooth(),
}


def constraint_named(name: str) -> Constraint:
    """The constraint behind `kerple_constraint: <name>`."""
    return CONSTRAINTS[one_of("kerple_constraint", name, tuple(CONSTRAINTS))]


def one_of(key: str, value: str, choices: tuple[str, ...]) -> str:
    """The value, if it is one of the choices."""
    if value not in choices:
        raise PositionalEmbeddingError(
            f"{key}: {value!r} is not one of {', '.join(map(repr, choices))}."
        )
    return value
