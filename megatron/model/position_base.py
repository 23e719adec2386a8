"""What the formulas in positional_embeddings.py stand on, with the numbers of learned_numbers.py.

Options, the registry, the base classes, and what makes a formula with learned numbers a module
(`DistanceKernel`). This file travels with every exported model, beside the formulas.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .learned_numbers import (
    Bounded,
    PositionalEmbeddingError,
    at_least_fp32,
    constraint_named,
    one_of,
    sharded_parameter,
)

Kind = Literal["input", "rotation", "tables", "none"]


# Options.


class MissingOptionError(PositionalEmbeddingError, AttributeError):
    """A positional embedding reads a key that nobody gave."""


@dataclass(frozen=True)
class PositionOptions:
    """What a positional embedding is told: the model's keys, and which heads are its own.

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


def room_for(length: int) -> int:
    """The next power of two: caches that grow token by token in generation grow seldom."""
    return 1 << max(length - 1, 0).bit_length()


class Tables(NamedTuple):
    """Functions of distance, each [local heads, length]: score = (q.k) * scale * weight + bias."""

    bias: Tensor | None = None
    weight: Tensor | None = None


class PositionalEmbedding(nn.Module):
    """The base of all; `kind` tells the model where it acts."""

    name: ClassVar[str] = ""
    kind: ClassVar[Kind]

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


class InputEmbedding(PositionalEmbedding):
    """Adds something to the token embeddings x_BLH; position `offset` is the first of them.

    With `reset_position_ids`, `positions` [B, L] tells each token's own position.
    """

    kind = "input"

    def forward(self, x_BLH: Tensor, offset: int = 0, positions: Tensor | None = None) -> Tensor:
        raise NotImplementedError


class TableEmbedding(PositionalEmbedding):
    """Tables over distance: column d belongs to keys d positions before the query.

             key 0   1   2   3
    query 0     t0
    query 1     t1  t0                 t = forward(4), one such row per head
    query 2     t2  t1  t0
    query 3     t3  t2  t1  t0
    """

    kind = "tables"
    table_names: ClassVar[tuple[str, ...]] = ("bias",)

    def __init__(self, options: PositionOptions) -> None:
        super().__init__(options)
        self._distances = torch.empty(0)

    def forward(self, length: int) -> Tables:
        raise NotImplementedError

    def distances(self, length: int) -> Tensor:
        """0, 1, ..., length-1 in fp32, kept between calls (neither parameter nor buffer)."""
        if self._distances.numel() < length or self._distances.device != self.device:
            with torch.inference_mode(False):
                self._distances = torch.arange(
                    room_for(length), dtype=torch.float32, device=self.device
                )
        return self._distances[:length]


# The registry.

Cls = TypeVar("Cls", bound=type[PositionalEmbedding])

POSITIONAL_EMBEDDINGS: dict[str, type[PositionalEmbedding]] = {}
ALIASES: dict[str, str] = {}
"""Other names of registered embeddings -> the registered ones."""


def register(name: str, aliases: Iterable[str] = ()) -> Callable[[Cls], Cls]:
    """Class decorator: make a positional embedding available as `pos_emb: <name>`."""

    def decorate(cls: Cls) -> Cls:
        for key in (name, *aliases):
            other = POSITIONAL_EMBEDDINGS.get(ALIASES.get(key, key))
            # A module that runs twice (as script and as import) may register itself again.
            if other is not None and other.__qualname__ != cls.__qualname__:
                raise PositionalEmbeddingError(
                    f"pos_emb {key!r} is taken by {other.__module__}.{other.__qualname__}; "
                    "register yours under another name."
                )
        cls.name = name
        POSITIONAL_EMBEDDINGS[name] = cls
        ALIASES.update(dict.fromkeys(aliases, name))
        return cls

    return decorate


# A formula and its learned numbers as a module.


class DistanceKernel(TableEmbedding):
    """The KERPLE framework: one formula of distance and of learned parameters per head.

    Subclasses declare `learnable` and define `bias(self, d, ...)` or `weight(self, d, ...)` or
    both. d is [length]; each parameter named in the signature arrives as [local heads, 1], already
    inside its bounds.
    """

    learnable: ClassVar[Mapping[str, Bounded]] = {}
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
        pre = one_of("kerple_bias_scale", options.kerple_bias_scale, ("post", "pre")) == "pre"
        self._divisor = math.sqrt(options.head_dim) if pre else None  # Eq. 1
        self._constraint = constraint_named(options.kerple_constraint)
        for name, raw in self.initial_values().items():
            self.register_parameter(name, sharded_parameter(raw))

    def initial_values(self) -> dict[str, Tensor]:
        values = {}
        for name, spec in self.learnable.items():
            everyone = spec.init.draw(self.options.num_heads, self.options.generator(name))
            values[name] = self._constraint.raw(everyone[self.options.local_heads], spec)
        return values

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


def _formula_arguments(cls: type, table: str, learnable: Mapping[str, Bounded]) -> tuple[str, ...]:
    names = tuple(inspect.signature(getattr(cls, table)).parameters)[2:]  # after self and d
    for name in names:
        if name not in learnable:
            raise PositionalEmbeddingError(
                f"{cls.__name__}.{table}() takes {name!r}, which is not in its `learnable` "
                f"({', '.join(learnable) or 'empty'}); declare it there."
            )
    return names
