"""From the value of `pos_emb` to a class: registered names, aliases, user-defined classes."""

from __future__ import annotations

import difflib
from types import SimpleNamespace
from typing import Any

import megatron.model.content_positions
import megatron.model.positional_embeddings
import megatron.model.rotary_and_input_positions  # noqa: F401 - these register their classes
from megatron.errors import PositionalEmbeddingError, UnknownPositionalEmbeddingError
from megatron.model.position_base import (
    ALIASES,
    POSITIONAL_EMBEDDINGS,
    PositionalEmbedding,
    PositionOptions,
    TableEmbedding,
)
from megatron.neox_arguments.allowed_code import allow_kernel, imported_class, is_import_path
from megatron.neox_arguments.catalogue import aliases, canonical_method
from megatron.neox_arguments.position_keys import (
    PositionKeys,
    check_position_keys,
    require_positive,
)

ALIASES.update(aliases())  # so that no class can be registered under one of them


def canonical_name(name: str) -> str:
    """The registered name behind an alias; `package.module:Class` stays as it is."""
    resolved = canonical_method(name)
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
    found = imported_class("pos_emb", resolved, UnknownPositionalEmbeddingError)
    if not (isinstance(found, type) and issubclass(found, PositionalEmbedding)):
        raise UnknownPositionalEmbeddingError(
            f"pos_emb: {name!r} is not a PositionalEmbedding; derive it from DistanceKernel, "
            "TableEmbedding, InputEmbedding or RotaryEmbedding."
        )
    if not found.name:
        found.name = resolved
    return found


def build_positional_embedding(name: str, options: PositionOptions) -> PositionalEmbedding:
    """The positional embedding that `pos_emb: <name>` asks for."""
    return positional_embedding_class(name)(options)


# A positional embedding on its own, for a model that is not ours.
#
# from kerple import attention, kernel
#
# log = kernel("kerple_log", heads=12)
# tables = log(512)                      # tables.bias is [12, 512], differentiable
# out = attention(q, k, v, tables.bias, tables.weight)

_ACTS_ON = {
    "rotation": "q and k",
    "input": "the input embeddings",
    "none": "nothing",
    "layer": "the scores of each layer by its input",
}


def position_options(
    *, heads: int, head_dim: int | None = None, seed: int = PositionKeys.seed, **keys: Any
) -> PositionOptions:
    """Options of a positional embedding without a model around it.

    `keys` are those of `PositionKeys`; a key not given has its default. Without head_dim, a method
    that needs it says so.
    """
    require_positive(heads=heads, **({} if head_dim is None else {"head_dim": head_dim}))
    config = SimpleNamespace(**vars(check_position_keys(seed=seed, **keys)))
    config.num_attention_heads = heads
    if head_dim is not None:
        config.head_dim, config.hidden_size = head_dim, heads * head_dim
    return PositionOptions(config)


def kernel(
    name: str,
    *,
    heads: int,
    head_dim: int | None = None,
    seed: int = PositionKeys.seed,
    **keys: Any,
) -> TableEmbedding:
    """The module behind `pos_emb: <name>`: call it with a length for the tables over distance.

    Column d of `tables.bias` and `tables.weight` ([heads, length], None where the method has none)
    belongs to keys d positions before the query: score = q.k / sqrt(head_dim) * weight + bias.
    T5's bias (`rpe`) and `kerple_bias_scale="pre"` depend on head_dim and ask for it. A class of
    your own, `package.module:Class`, is imported, which executes it: do not pass untrusted names.
    """
    if is_import_path(name):
        allow_kernel(name)  # the caller named it, no file
    method = positional_embedding_class(name)
    if not issubclass(method, TableEmbedding):
        raise PositionalEmbeddingError(
            f"kernel({name!r}): this method has no table over distance (it acts on "
            f"{_ACTS_ON.get(method.kind, method.kind)}); "
            "build the model with pos_emb instead, or choose a method with tables."
        )
    embedding = method(position_options(heads=heads, head_dim=head_dim, seed=seed, **keys))
    embedding.stays_fp32 = True
    return embedding
