"""Base classes of the formulas in positional_embeddings.py.

Options, the registry, initial values and constraints of learned parameters, and the module that
evaluates a formula with such parameters (`DistanceKernel`). Every exported model contains this
file, beside the formulas.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    if __package__ != "megatron.model":  # inside an export our package is not imported
        raise ImportError
    from megatron.errors import PositionalEmbeddingError as PositionalEmbeddingError
except ImportError:

    class PositionalEmbeddingError(ValueError):  # type: ignore[no-redef]
        """A positional embedding cannot be built with these options."""


# Options.


class MissingOptionError(PositionalEmbeddingError, AttributeError):
    """A positional embedding reads a key that is not set."""


@dataclass(frozen=True)
class PositionOptions:
    """The options of a positional embedding: the model's keys, and this rank's heads.

    `options.rpe_num_buckets` is the config key of that name: `config` is anything that has the
    model's keys as attributes. Sizes are those of the whole model.
    """

    config: Any
    layer: int | None = None  # set by `kerple_share: per_layer`, so that layers start different
    tp_rank: int = 0
    tp_size: int = 1

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__") or key == "config":  # asked by copy and pickle
            raise AttributeError(key)
        try:
            return getattr(self.config, key)
        except AttributeError as error:
            raise MissingOptionError(
                f"this positional embedding needs {key}, which was not given; give {key}=..."
            ) from error

    @property
    def num_heads(self) -> int:
        """All heads of the model."""
        return int(self.config.num_attention_heads)

    @property
    def local_heads(self) -> slice:
        """The heads that this tensor-parallel rank owns."""
        count = self.num_heads // self.tp_size
        return slice(self.tp_rank * count, (self.tp_rank + 1) * count)

    def generator(self, parameter: str) -> torch.Generator:
        """Random numbers that depend on seed, layer and parameter, never on the parallel layout.

        A model without a seed of its own (an exported one) draws from torch's stream.
        """
        seed = getattr(self.config, "seed", None)
        if seed is None:
            seed = int(torch.randint(2**53, (), device="cpu").item())
        key = f"{seed}/{self.layer}/{parameter}".encode()
        number = int.from_bytes(hashlib.sha256(key).digest()[:7], "little")
        return torch.Generator().manual_seed(number)


# Base classes.


class Tables(NamedTuple):
    """Functions of distance, each [local heads, length]: score = (q.k) * scale * weight + bias."""

    bias: Tensor | None = None
    weight: Tensor | None = None


class PositionalEmbedding(nn.Module):
    """The base of all; `kind` tells the model where it acts."""

    name: ClassVar[str] = ""
    kind: ClassVar[Literal["input", "rotation", "tables", "layer", "none"]]
    layer_terms: ClassVar[type[Any] | None] = None
    """Of which every layer has a module that computes terms from its input (content_positions)."""

    def __init__(self, options: PositionOptions) -> None:
        super().__init__()
        self.options = options
        # Tells the device even where there are no parameters; empty, so casting it does no harm.
        self.register_buffer("_anchor", torch.empty(0), persistent=False)

    @property
    def device(self) -> torch.device:
        return self.get_buffer("_anchor").device

    def initial_values(self) -> dict[str, Tensor]:
        """What each parameter starts from, this rank's share (nothing by default)."""
        return {}

    def kernel_values(self) -> dict[str, Tensor]:
        """The learned kernel parameters per local head, constraints applied (none by default)."""
        return {}

    def project_(self) -> None:
        """Bring the parameters back into their bounds, where the constraint asks for it."""

    def to_draw(self, length: int) -> dict[str, Tensor]:
        """What it has over distance, [rows, distances] by name (nothing by default)."""
        return {}


class TableEmbedding(PositionalEmbedding):
    """Tables over distance: column d belongs to keys d positions before the query.

    With t = forward(4), of which each head has its own row, the scores get:

        key       0   1   2   3
        query 0  t0
        query 1  t1  t0
        query 2  t2  t1  t0
        query 3  t3  t2  t1  t0
    """

    kind = "tables"
    table_names: ClassVar[tuple[str, ...]] = ("bias",)
    stays_fp32 = False

    def forward(self, length: int) -> Tables:
        raise NotImplementedError

    def to_draw(self, length: int) -> dict[str, Tensor]:
        tables = self(length)._asdict()
        return {name: table for name, table in tables.items() if table is not None}

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """A plain nn.Parameter is taken for the kernel's, with the heads along dimension 0."""
        if param is not None and not hasattr(param, "facts"):
            declare_kernel_parameter(param)
        super().register_parameter(name, param)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TableEmbedding:
        """`model.bfloat16()` of a user's own model leaves a kernel of `kernel()` in fp32."""
        keep = partial(_without_rounding, fn) if self.stays_fp32 else fn
        return super()._apply(keep, recurse)

    def distances(self, length: int) -> Tensor:
        """0, 1, ..., length-1 in fp32."""
        if isinstance(length, float) or length < 1:
            raise PositionalEmbeddingError(
                f"length = {length}: must be a whole number, at least 1."
            )
        return torch.arange(length, dtype=torch.float32, device=self.device)


def _without_rounding(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """What fn makes of a tensor; only its device, where fn would round."""
    result = fn(tensor)
    return tensor.to(result.device) if result.itemsize < tensor.itemsize else result


# The registry.

Cls = TypeVar("Cls", bound=type[PositionalEmbedding])

POSITIONAL_EMBEDDINGS: dict[str, type[PositionalEmbedding]] = {}
ALIASES: dict[str, str] = {}
"""Other names of registered embeddings, which no class may take -> the registered ones."""


def register(name: str) -> Callable[[Cls], Cls]:
    """Class decorator: make a positional embedding available as `pos_emb: <name>`."""

    def decorate(cls: Cls) -> Cls:
        other = POSITIONAL_EMBEDDINGS.get(ALIASES.get(name, name))
        # A module that runs twice (as script and as import) may register itself again.
        if other is not None and other.__qualname__ != cls.__qualname__:
            raise PositionalEmbeddingError(
                f"pos_emb {name!r} is taken by {other.__module__}.{other.__qualname__}; "
                "register yours under another name."
            )
        cls.name = name
        POSITIONAL_EMBEDDINGS[name] = cls
        return cls

    return decorate


# Learned parameters: initial values, bounds, and the constraints that keep them in bounds.


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
    minimum: float = 0.01  # the official code's, for every kernel parameter
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
    """Straight-through estimator: clamped in the forward, not in the gradient.

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


def at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def log1p(x: Tensor) -> Tensor:
    """log(1 + x); in bf16 and fp16 the sum is rounded first, as in the official code."""
    return torch.log(1 + x) if x.dtype in (torch.bfloat16, torch.float16) else torch.log1p(x)


KERNEL_FACTS: dict[str, Any] = {"fp32": True, "decay": False, "rate": "kernel"}
"""Of every parameter of a kernel; ParameterFacts in mpu/parallel_layers.py describes them."""


def sharded_parameter(values: Tensor, *, split: int = 0, official: str = "") -> nn.Parameter:
    """A kernel's parameter, which `weight_decay` leaves alone; it holds this rank's heads.

    `split` is the dimension of the heads, `official` its name in a file of GPT-NeoX or of the
    official KERPLE code.
    """
    # Exported models are built on the meta device before their weights are read.
    parameter = nn.Parameter(values.contiguous().to(torch.get_default_device()))
    declare_kernel_parameter(parameter, split, official)
    return parameter


def declare_kernel_parameter(parameter: nn.Parameter, split: int = 0, official: str = "") -> None:
    """State its facts."""
    neox = f"attention.rpe.{official}" if official else None
    facts = {"split": split, "neox": neox, **KERNEL_FACTS}
    parameter.facts = facts  # type: ignore[attr-defined]
    for flag in ("is_kernel_parameter", "model_parallel", "tensor_model_parallel"):
        setattr(parameter, flag, True)


# A formula and its learned numbers as a module.


class DistanceKernel(TableEmbedding):
    """The KERPLE framework: one formula of distance and of learned parameters per head.

    Subclasses declare `learnable` (and `official`, a parameter's name in a file of the official
    code, if it is there) and define `bias(self, d, ...)` or `weight(self, d, ...)` or
    both. d is [length]; each parameter named in the signature arrives as [local heads, 1], already
    inside its bounds.
    """

    learnable: ClassVar[Mapping[str, Bounded]] = {}
    official: ClassVar[Mapping[str, str]] = {}
    scale: ClassVar[str | None] = None
    """The parameter that the bias, this kernel's only table, is proportional to."""
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
        pre = _one_of("kerple_bias_scale", options.kerple_bias_scale, ("post", "pre")) == "pre"
        self._divisor = math.sqrt(options.head_dim) if pre else None  # Eq. 1
        constraint = _one_of("kerple_constraint", options.kerple_constraint, CONSTRAINTS)
        self._constraint = CONSTRAINTS[constraint]
        self._legacy = _legacy_precision(options)
        for name, raw in self.initial_values().items():
            official = self.official.get(name, "")
            self.register_parameter(name, sharded_parameter(raw, official=official))

    def initial_values(self) -> dict[str, Tensor]:
        values = {}
        flat = getattr(self.options, "kerple_init", "official") == "flat"
        if flat and self.scale is None:
            raise PositionalEmbeddingError(
                f"kerple_init: flat with pos_emb {self.name}, whose tables are not proportional to "
                "one parameter; use kerple_init official."
            )
        for name, spec in self.learnable.items():
            everyone = spec.init.draw(self.options.num_heads, self.options.generator(name))
            if flat and name == self.scale:
                everyone = torch.full_like(everyone, spec.minimum)
            elif flat and isinstance(spec, Exponent):  # a power of 2 would not be flat
                everyone = torch.full_like(everyone, 0.5)
            values[name] = self._constraint.raw(everyone[self.options.local_heads], spec)
        return values

    def forward(self, length: int) -> Tables:
        values = {name: value.unsqueeze(1) for name, value in self._values().items()}
        d = self.distances(length)
        if values:
            d = d.to(next(iter(values.values())).dtype)
        if self._legacy is not None:
            d, values = d.to(self._legacy), {k: v.to(self._legacy) for k, v in values.items()}
        tables = {}
        for table, names in self._arguments.items():
            formula: Callable[..., Tensor] = getattr(self, table)
            tables[table] = at_least_fp32(formula(d, *(values[name] for name in names)))
        if "bias" in tables and self._divisor is not None:
            tables["bias"] = tables["bias"] / self._divisor
        return Tables(**tables)

    def _values(self) -> dict[str, Tensor]:
        # In fp32 even where DeepSpeed has cast the module's parameters to bf16 or fp16.
        return {
            name: self._constraint.value(at_least_fp32(getattr(self, name)), spec)
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


def _legacy_precision(options: PositionOptions) -> torch.dtype | None:
    """The precision that a kerple_legacy key asks for; None: fp32."""
    if options.kerple_legacy_bf16 and options.kerple_legacy_fp16:
        raise PositionalEmbeddingError(
            "kerple_legacy_bf16 and kerple_legacy_fp16 are both true: set one of them."
        )
    if options.kerple_legacy_bf16:
        return torch.bfloat16
    return torch.float16 if options.kerple_legacy_fp16 else None


def _one_of(key: str, value: str, choices: Iterable[str]) -> str:
    if value not in choices:
        raise PositionalEmbeddingError(
            f"{key}: {value!r} is not one of {', '.join(map(repr, choices))}."
        )
    return value


def _formula_arguments(cls: type, table: str, learnable: Mapping[str, Bounded]) -> tuple[str, ...]:
    names = tuple(inspect.signature(getattr(cls, table)).parameters)[2:]  # after self and d
    for name in names:
        if name not in learnable:
            raise PositionalEmbeddingError(
                f"{cls.__name__}.{table}() takes {name!r}, which is not in its `learnable` "
                f"({', '.join(learnable) or 'empty'}); declare it there."
            )
    return names
