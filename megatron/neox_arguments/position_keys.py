"""The config keys that a positional embedding reads: types and defaults, standard library only.

`ModelArgs` and `RuntimeArgs` declare these keys with the defaults given here. `kernel(...)` checks
them here, so that it needs no pydantic.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from megatron.errors import ConfigError, did_you_mean

Constraint = Literal["ste", "project", "softplus"]
BiasScale = Literal["post", "pre"]
KernelInit = Literal["official", "flat", "fit"]


@dataclass(frozen=True)
class PositionKeys:
    """The config keys that a positional embedding reads, beside the sizes of the model."""

    rpe_num_buckets: int = 32
    rpe_max_distance: int = 128
    rotary_pct: float = 1.0
    rotary_emb_base: float = 10000
    rope_scaling: Any = None
    inkling_features: int = 16
    inkling_distances: int = 1024
    fire_threshold: int = 512
    kerple_constraint: Constraint = "ste"
    kerple_bias_scale: BiasScale = "post"
    kerple_init: KernelInit = "official"
    kerple_legacy_bf16: bool = False
    kerple_legacy_fp16: bool = False
    seq_length: int = 2048
    max_position_embeddings: int = 2048
    init_method_std: float = 0.02
    seed: int = 1234


_CHOICES = {
    "kerple_constraint": get_args(Constraint),
    "kerple_bias_scale": get_args(BiasScale),
    "kerple_init": get_args(KernelInit),
}
_KINDS: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "bool": bool}


def check_position_keys(**keys: Any) -> PositionKeys:
    """The keys given and the defaults of the others; ConfigError for a wrong name or value."""
    known = {field.name: field for field in fields(PositionKeys)}
    for key, value in keys.items():
        if key not in known:
            hint = did_you_mean(key, known, f"Keys here: {', '.join(known)}.")
            raise ConfigError(f"unknown key {key!r:.120}. {hint}")
        choices, kind = _CHOICES.get(key), _KINDS.get(str(known[key].type))
        if choices is not None and value not in choices:
            raise ConfigError(f"{key} = {value!r:.80} is wrong: use {' or '.join(choices)}.")
        if kind is not None and not isinstance(value, kind):
            raise ConfigError(f"{key} = {value!r:.80} is wrong: it should be {known[key].type}.")
        if known[key].type == "int":
            require_positive(**{key: value})
    return PositionKeys(**keys)


def require_positive(**sizes: Any) -> None:
    """ConfigError unless every value is a whole number of at least 1; a seed may be 0."""
    for name, value in sizes.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        least = 0 if name == "seed" else 1
        if not whole or value < least:
            raise ConfigError(
                f"{name} = {value!r:.80} is wrong: use a whole number from {least} on."
            )
