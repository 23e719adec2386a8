"""From the value of `pos_emb` to a class: registered names, aliases, classes of the user's own."""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import Any

import megatron.model.input_positions
import megatron.model.positional_embeddings
import megatron.model.rotary  # noqa: F401 - these three register their classes
from megatron.errors import UnknownPositionalEmbeddingError
from megatron.model.position_base import (
    ALIASES,
    POSITIONAL_EMBEDDINGS,
    PositionalEmbedding,
    PositionOptions,
)
from megatron.neox_arguments.catalogue import aliases, canonical_method, is_allowed, is_import_path

__all__ = [
    "UnknownPositionalEmbeddingError",
    "build_positional_embedding",
    "canonical_name",
    "positional_embedding_class",
]


ALIASES.update(aliases())  # known to the registry too, so that nobody takes one of them


def canonical_name(name: str) -> str:
    """The registered name behind an alias; `package.module:Class` stays as it is."""
    resolved = ALIASES.get(name, canonical_method(name))
    if resolved in POSITIONAL_EMBEDDINGS or ":" in resolved:
        return resolved
    known = sorted({*POSITIONAL_EMBEDDINGS, *ALIASES})
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
