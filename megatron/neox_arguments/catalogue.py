"""Which values of `pos_emb` exist, known here without importing torch.

The registry in `megatron.model.positional_embeddings` is the authority; this list lets a config be
checked on a login node in milliseconds. Names that are not in it are looked up in the registry, and
`module:ClassName` is imported, so that a kernel of your own needs no change here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from megatron.errors import ConfigError
from megatron.neox_arguments.model_keys import ModelArgs

ParameterCount = Callable[[ModelArgs], int]


@dataclass(frozen=True)
class KnownPosition:
    """How many parameters a positional embedding has, and what it is."""

    parameters: ParameterCount
    summary: str


def _per_head(count: int) -> ParameterCount:
    def parameters(model: ModelArgs) -> int:
        owners = model.num_layers if model.kerple_share == "per_layer" else 1
        return count * model.num_attention_heads * owners

    return parameters


def _none(model: ModelArgs) -> int:
    return 0


def _learned_rows(model: ModelArgs) -> int:
    return model.position_rows * model.hidden_size


def _t5_buckets(model: ModelArgs) -> int:
    owners = model.num_layers if model.kerple_share == "per_layer" else 1
    return model.rpe_num_buckets * model.num_attention_heads * owners


KNOWN_POSITIONS: dict[str, KnownPosition] = {
    "learned": KnownPosition(_learned_rows, "a vector per position, none beyond training length"),
    "sinusoidal": KnownPosition(_none, "fixed sines and cosines added to the input"),
    "rotary": KnownPosition(_none, "queries and keys rotated by position"),
    "rpe": KnownPosition(_t5_buckets, "T5's bias, one value per distance bucket"),
    "alibi": KnownPosition(_none, "linear bias with fixed slopes"),
    "sandwich": KnownPosition(_none, "inner products of sinusoids as a bias"),
    "none": KnownPosition(_none, "no positional embedding"),
    "kerple_log": KnownPosition(_per_head(2), "-r1 log(1 + r2 d), the paper's best"),
    "kerple_power": KnownPosition(_per_head(2), "-r1 d^r2"),
    "kerple_log3": KnownPosition(_per_head(3), "3-para-log"),
    "kerple_bias_wht": KnownPosition(_per_head(4), "bias+wht"),
    "kerple_power_original": KnownPosition(_none, "ALiBi as the official code's power kernel"),
    "gauss_bias2": KnownPosition(_per_head(2), "2-para-bias"),
    "gauss_bias3": KnownPosition(_per_head(3), "3-para-bias"),
    "gauss_wht1": KnownPosition(_per_head(1), "1-para-wht"),
    "gauss_wht2": KnownPosition(_per_head(2), "2-para-wht"),
}

OFFICIAL_NAMES: dict[str, str] = {
    "kerple_power_ap_": "kerple_power",
    "kerple_power_ap_ap": "kerple_bias_wht",
    "kerple_power__ap": "gauss_wht2",
}
"""The official KERPLE fork's names -> ours."""


def known_position(name: str) -> KnownPosition | None:
    """What is known about `name` without torch."""
    return KNOWN_POSITIONS.get(OFFICIAL_NAMES.get(name, name))


def check_position_name(name: str) -> None:
    """ConfigError unless `name` is known, registered or importable as module:ClassName."""
    if known_position(name) is not None:
        return
    try:
        registry = importlib.import_module("megatron.model.positional_embeddings")
    except ImportError as error:
        raise ConfigError(
            f"pos_emb = {name!r:.80} is not one of {', '.join(KNOWN_POSITIONS)}, and the "
            f"registry cannot be asked: {error}."
        ) from error
    try:
        registry.positional_embedding_class(name)
    except registry.UnknownPositionalEmbeddingError as error:
        raise ConfigError(str(error)) from error
    except Exception as error:  # a module of the user's runs here and may raise anything
        raise ConfigError(
            f"pos_emb = {name!r:.80}: importing it failed with {type(error).__name__}: {error}."
        ) from error
