"""From what people write to canonical keys: hyphens, old names, old ways to say bf16."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from megatron.errors import ConfigError
from megatron.neox_arguments.foreign_keys import ALIASES, ForeignKeys

NESTED_BLOCKS = frozenset(
    {
        "optimizer",
        "zero_optimization",
        "fp16",
        "bf16",
        "activation_checkpointing",
        "rope_scaling",
    }
)
_PRECISION_NAMES = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "fp16": "fp16",
    "float32": "fp32",
    "fp32": "fp32",
}


def canonical_key(key: str) -> str:
    """`save-interval` -> `checkpoint_factor`."""
    underscored = key.replace("-", "_")
    return ALIASES.get(underscored, underscored)


def unknown_key(key: str, known: list[str], source: str) -> str:
    """What to say of a key that nobody knows, with the nearest one that exists."""
    close = get_close_matches(key, [*known, *ALIASES], n=1, cutoff=0.6)
    hint = f"Did you mean {close[0]}?" if close else "docs/neox_arguments.md lists every key."
    return f"{source}: unknown key {key!r:.80}. {hint}"


def normalize(
    values: dict[str, Any], known: list[str], source: str, problems: list[str]
) -> dict[str, Any]:
    """Canonical keys and values of one layer (a file, a --set).

    Every key is checked; all that is wrong with them is added to `problems`.
    """
    result: dict[str, Any] = {}
    foreign, unknown = ForeignKeys(source), []
    for raw_key, raw_value in values.items():
        key = canonical_key(raw_key)
        if key not in known:
            if not foreign.passes_over(key, raw_value):
                unknown.append(unknown_key(raw_key, known, source))
            continue
        value = _normalize_value(key, raw_value, source)
        if key in result and result[key] != value:
            unknown.append(
                f"{source}: {key} is given twice with different values, {result[key]!r:.80} and "
                f"{value!r:.80} (hyphens, underscores and old names are the same key). Keep one."
            )
        result[key] = value
    problems += [*foreign.problems(), *unknown]
    _move_bfloat16_block(result, source)
    return result


def _normalize_value(key: str, value: Any, source: str) -> Any:
    if key in NESTED_BLOCKS:
        block = _underscore_keys(value)
        if key == "bf16" and isinstance(block, dict):  # written like fp16's, which scales its loss
            return {name: item for name, item in block.items() if name not in _OF_LOSS_SCALING}
        return block
    if key == "precision" and isinstance(value, str):
        return _PRECISION_NAMES.get(value.lower(), value)
    if key == "pos_emb" and value is None:
        raise ConfigError(f"{source}: pos_emb = null is ambiguous; write `none` for no positions.")
    if key == "split" and isinstance(value, list):
        return ",".join(str(share) for share in value)
    return value


_OF_LOSS_SCALING = {
    "bf16",
    "loss_scale",
    "loss_scale_window",
    "initial_scale_power",
    "hysteresis",
    "min_loss_scale",
}


def _underscore_keys(value: Any) -> Any:
    if isinstance(value, bool):
        return {"enabled": value}
    if isinstance(value, dict):
        return {
            key.replace("-", "_"): _underscore_keys(item) if isinstance(item, dict) else item
            for key, item in value.items()
        }
    return value


def _move_bfloat16_block(values: dict[str, Any], source: str) -> None:
    """`fp16: {enabled: True, type: bfloat16}` has always been meant as bf16."""
    block = values.get("fp16")
    if not isinstance(block, dict):
        return
    block = {key: item for key, item in block.items() if key != "fp16"}
    kind = block.pop("type", None)
    values["fp16"] = block
    if kind is None:
        return
    name = _PRECISION_NAMES.get(kind.lower()) if isinstance(kind, str) else None
    if name not in ("bf16", "fp16"):
        raise ConfigError(f"{source}: fp16.type = {kind!r:.80}; use fp16 or bfloat16.")
    if name == "fp16":
        return
    bf16 = {"enabled": block.get("enabled", True)}
    if values.setdefault("bf16", bf16) != bf16:
        raise ConfigError(
            f"{source}: fp16.type = bfloat16 and the bf16 block disagree. Keep the bf16 block only."
        )
    del values["fp16"]


def resolve_precision(values: dict[str, Any]) -> dict[str, Any]:
    """Make `precision` and the fp16/bf16 blocks say the same; ConfigError if they cannot."""
    resolved = dict(values)
    enabled = [
        name
        for name in ("fp16", "bf16")
        if isinstance(values.get(name), dict) and values[name].get("enabled", True) is not False
    ]
    if len(enabled) == 2:
        raise ConfigError(
            "fp16 and bf16 are both enabled. Keep one block, or use `--set precision=bf16`."
        )
    precision = values.get("precision")
    if precision is None:
        precision = enabled[0] if enabled else "fp32"
    elif enabled and precision in ("fp32", "fp16", "bf16") and precision != enabled[0]:
        raise ConfigError(
            f"precision = {precision} but {enabled[0]}.enabled is true. Remove the "
            f"{enabled[0]} block or set precision to {enabled[0]}."
        )
    resolved["precision"] = precision
    for name in ("fp16", "bf16"):
        block = resolved.get(name)
        if name == precision:
            resolved[name] = {} if block is None else block
        elif isinstance(block, dict) and name not in enabled:
            resolved[name] = None
    return resolved
