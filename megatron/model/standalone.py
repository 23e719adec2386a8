"""A positional embedding on its own, for a model that is not ours.

from megatron import attention, kernel

log = kernel("kerple_log", heads=12)
tables = log(512)                      # tables.bias is [12, 512], differentiable
out = attention(q, k, v, tables.bias, tables.weight)
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pydantic import ValidationError

from megatron.errors import ConfigError, PositionalEmbeddingError
from megatron.model.position_base import PositionOptions, TableEmbedding
from megatron.model.position_names import build_positional_embedding
from megatron.neox_arguments.model_keys import ModelArgs
from megatron.neox_arguments.run_keys import RuntimeArgs
from megatron.neox_arguments.validation import describe_validation_error

__all__ = ["kernel", "position_options"]

_SEED = RuntimeArgs.model_fields["seed"].default


def position_options(
    *, heads: int, head_dim: int | None = None, seed: int = _SEED, **keys: Any
) -> PositionOptions:
    """Options of a positional embedding without a model around it.

    `keys` are model keys of the config (kerple_constraint, rpe_num_buckets, ...); those not given
    have their defaults. Without head_dim, a method that needs it says so.
    """
    try:
        model = ModelArgs(
            num_layers=1,
            hidden_size=heads * (head_dim or 1),
            num_attention_heads=heads,
            **keys,
        )
    except ValidationError as error:
        raise ConfigError("\n".join(describe_validation_error(error, ModelArgs))) from error
    config = SimpleNamespace(**dict(model), seed=seed)
    if head_dim is None:
        del config.hidden_size
    else:
        config.head_dim = head_dim
    return PositionOptions(config)


def kernel(
    name: str, *, heads: int, head_dim: int | None = None, seed: int = _SEED, **keys: Any
) -> TableEmbedding:
    """The module behind `pos_emb: <name>`: call it with a length for the tables over distance.

    Column d of `tables.bias` and `tables.weight` ([heads, length], None where the method has none)
    belongs to keys d positions before the query: score = q.k / sqrt(head_dim) * weight + bias.
    T5's bias (`rpe`) and `kerple_bias_scale="pre"` depend on head_dim and ask for it.
    """
    options = position_options(heads=heads, head_dim=head_dim, seed=seed, **keys)
    embedding = build_positional_embedding(name, options)
    if not isinstance(embedding, TableEmbedding):
        raise PositionalEmbeddingError(
            f"kernel({name!r}): this method has no table over distance (it acts on "
            f"{'q and k' if embedding.kind == 'rotation' else 'the input embeddings'}); "
            "build the model with pos_emb instead, or choose a method with tables."
        )
    return embedding
