"""What every positional embedding shares: options, registry, errors and base classes."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from megatron.errors import PositionalEmbeddingError, UnknownPositionalEmbeddingError
from megatron.neox_arguments.trust import is_allowed, is_import_path

__all__ = [
    "POSITIONAL_EMBEDDINGS",
    "InputEmbedding",
    "PositionOptions",
    "PositionalEmbedding",
    "PositionalEmbeddingError",
    "TableEmbedding",
    "Tables",
    "UnknownPositionalEmbeddingError",
    "build_positional_embedding",
    "canonical_name",
    "positional_embedding_class",
    "register",
]

Kind = Literal["input", "rotation", "tables", "none"]


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

    def __post_init__(self) -> None:
        if self.num_heads % self.tp_size or not 0 <= self.tp_rank < self.tp_size:
            raise PositionalEmbeddingError(
                f"num_attention_heads: {self.num_heads} heads cannot be split over "
                f"model_parallel_size {self.tp_size} (rank {self.tp_rank}); "
                "use a number of heads that model_parallel_size divides."
            )

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
        """Random numbers that depend on seed, layer and parameter, never on the parallel layout."""
        key = f"{self.seed}/{self.layer}/{parameter}".encode()
        seed = int.from_bytes(hashlib.sha256(key).digest()[:7], "little")
        return torch.Generator().manual_seed(seed)


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

    def kernel_values(self) -> dict[str, Tensor]:
        """The learned kernel parameters per local head, constraints applied (none by default)."""
        return {}

    def project_(self) -> None:
        """Bring the parameters back into their bounds, where the constraint asks for it."""


class InputEmbedding(PositionalEmbedding):
    """Adds something to the token embeddings x_BLH; position `offset` is the first of them."""

    kind = "input"

    def forward(self, x_BLH: Tensor, offset: int = 0) -> Tensor:
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


Cls = TypeVar("Cls", bound=type[PositionalEmbedding])

POSITIONAL_EMBEDDINGS: dict[str, type[PositionalEmbedding]] = {}
_ALIASES: dict[str, str] = {}


def register(name: str, aliases: Iterable[str] = ()) -> Callable[[Cls], Cls]:
    """Class decorator: make a positional embedding available as `pos_emb: <name>`."""

    def decorate(cls: Cls) -> Cls:
        for key in (name, *aliases):
            other = POSITIONAL_EMBEDDINGS.get(_ALIASES.get(key, key))
            # A module that runs twice (as script and as import) may register itself again.
            if other is not None and other.__qualname__ != cls.__qualname__:
                raise PositionalEmbeddingError(
                    f"pos_emb {key!r} is taken by {other.__module__}.{other.__qualname__}; "
                    "register yours under another name."
                )
        cls.name = name
        POSITIONAL_EMBEDDINGS[name] = cls
        _ALIASES.update(dict.fromkeys(aliases, name))
        return cls

    return decorate


def canonical_name(name: str) -> str:
    """The registered name behind an alias; `package.module:Class` stays as it is."""
    resolved = _ALIASES.get(name, name)
    if resolved in POSITIONAL_EMBEDDINGS or ":" in resolved:
        return resolved
    known = sorted({*POSITIONAL_EMBEDDINGS, *_ALIASES})
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise UnknownPositionalEmbeddingError(
        f"pos_emb: {name!r} is unknown.{hint} Use one of {', '.join(known)}, "
        "or package.module:ClassName for a class of your own."
    )


def positional_embedding_class(name: str) -> type[PositionalEmbedding]:
    """The class behind a `pos_emb` name, an official alias or `package.module:Class`."""
    resolved = canonical_name(name)
    if resolved in POSITIONAL_EMBEDDINGS:
        return POSITIONAL_EMBEDDINGS[resolved]
    found = _imported(resolved)
    if not (isinstance(found, type) and issubclass(found, PositionalEmbedding)):
        raise UnknownPositionalEmbeddingError(
            f"pos_emb: {name!r} is not a PositionalEmbedding; derive it from DistanceKernel, "
            "TableEmbedding, InputEmbedding or RotaryEmbedding."
        )
    if not found.name:
        found.name = resolved
    return found


def _imported(name: str) -> Any:
    """The class `package.module:Class`: importing runs code, so that the user must have named it.

    A class whose module this process has imported already runs nothing.
    """
    module_name, _, class_name = name.partition(":")
    module = sys.modules.get(module_name)
    if module is not None and class_name in vars(module):
        return vars(module)[class_name]
    if not is_import_path(name):
        raise UnknownPositionalEmbeddingError(
            f"pos_emb: {name!r:.80} is not of the form package.module:ClassName."
        )
    if not is_allowed(name):
        raise UnknownPositionalEmbeddingError(
            f"pos_emb: {name!r:.80} names a class to import, which a file that came with a "
            f"checkpoint may not do. If the class is yours, add --allow-kernel {name:.80} (in "
            f"Python: import its module first, or load_pretrained(..., allow_kernel={name!r:.80}))."
        )
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnknownPositionalEmbeddingError(
            f"pos_emb: {name!r} cannot be imported ({error}); "
            "check that the module is on PYTHONPATH and defines the class."
        ) from error


def build_positional_embedding(name: str, options: PositionOptions) -> PositionalEmbedding:
    """The positional embedding that `pos_emb: <name>` asks for."""
    return positional_embedding_class(name)(options)
