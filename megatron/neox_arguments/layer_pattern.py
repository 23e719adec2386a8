"""`layer_pattern`: the keys that some layers set otherwise than the model.

    layer_pattern:
      - {count: 5, pos_emb: kerple_log, sliding_window_width: 512}
      - {pos_emb: none, attention_temperature: {floor: 512}}

The list is repeated until num_layers; a layer's keys are those of its entry, and the model's where
the entry has none. `model/layer_list.py` builds the layers from it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from megatron.errors import ConfigError, did_you_mean
from megatron.neox_arguments.catalogue import check_position_name

if TYPE_CHECKING:
    from megatron.neox_arguments.model_keys import ModelArgs

MAX_COUNT = 100_000


def positions_named(values: Mapping[str, Any]) -> list[Any]:
    """The pos_emb of each entry in a config's layer_pattern; None where an entry names none."""
    pattern = values.get("layer_pattern")
    entries = pattern if isinstance(pattern, list) else []
    return [entry.get("pos_emb") for entry in entries if isinstance(entry, Mapping)]


def with_local_layers(values: dict[str, Any]) -> dict[str, Any]:
    """GPT-NeoX's attention_config with `local` layers and a window, as a pattern.

    Its local layers have the window sliding_window_width, its global layers have none. Without that
    key, or with something wrong in the list, values stay as they are, to be refused later.
    """
    config, window = values.get("attention_config"), values.get("sliding_window_width")
    layers = values.get("num_layers")
    if window is None or not isinstance(layers, int) or not isinstance(config, list):
        return values
    try:
        kinds = [
            kind
            for names, repeat in config
            for kind in names * (layers if repeat == "all" else repeat)
        ][:layers]
    except (TypeError, ValueError):
        return values
    if "local" not in kinds or values.get("layer_pattern") is not None:
        return values
    runs = [(is_local, len(list(run))) for is_local, run in groupby(k == "local" for k in kinds)]
    pattern = [
        {"count": count, "sliding_window_width": window if is_local else None}
        for is_local, count in runs
    ]
    plain = [[["global" if kind == "local" else kind], 1] for kind in kinds]
    return {**values, "attention_config": plain, "layer_pattern": pattern}


def with_whole_temperatures(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Each attention_temperature of a pattern with what it leaves out, so that equals are equal."""
    pattern = values.get("layer_pattern")
    if not isinstance(pattern, list):
        return values
    name = "attention_temperature"
    whole = [
        {**entry, name: {**defaults, **entry[name]}}
        if isinstance(entry, dict) and isinstance(entry.get(name), dict)
        else entry
        for entry in pattern
    ]
    return {**values, "layer_pattern": whole}


def check_layer_pattern(model: ModelArgs, allowed: Iterable[str]) -> None:
    """ConfigError unless every entry is a layer's: its count, its keys and their values."""
    pattern = model.layer_pattern
    if pattern is None:
        return
    if not pattern:
        raise ConfigError("layer_pattern is empty. Give one entry or more, or leave it out.")
    if _kind(model.pos_emb) == "input" and any(positions_named({"layer_pattern": pattern})):
        raise ConfigError(
            f"pos_emb = {model.pos_emb} is added to the input of the model, and layer_pattern "
            "names others for its layers. Leave out pos_emb, or each entry's pos_emb."
        )
    keys = ["count", *allowed]
    for place, entry in enumerate(pattern):
        where = f"layer_pattern[{place}]"
        for key in entry:
            if key in keys:
                continue
            if key in type(model).model_fields:
                raise ConfigError(
                    f"{where}: {key} is the same in all layers and cannot be set for some. Keys "
                    f"of an entry: {', '.join(keys)}."
                )
            hint = did_you_mean(key, keys, f"Keys of an entry: {', '.join(keys)}.")
            raise ConfigError(f"{where}: unknown key {key!r:.80}. {hint}")
        count = entry.get("count", 1)
        whole = isinstance(count, int) and not isinstance(count, bool)
        if not whole or not 1 <= count <= MAX_COUNT:
            raise ConfigError(
                f"{where}: count = {count!r:.80} is wrong: use a whole number of layers, 1 or more."
            )
        _check_position(where, entry)


def _check_position(where: str, entry: Mapping[str, Any]) -> None:
    if "pos_emb" not in entry:
        return
    name = entry["pos_emb"]
    if not isinstance(name, str):
        raise ConfigError(f"{where}: pos_emb = {name!r:.80} is no name; write `none` for none.")
    try:
        check_position_name(name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if _kind(name) == "input":
        raise ConfigError(
            f"{where}: pos_emb = {name} is added to the input of the model, not to a layer. Set "
            "pos_emb of the model, or choose a method with tables or a rotation."
        )


def knows_positions(name: str) -> bool:
    """Whether a method computes from a token's own position, not from distances alone."""
    return _kind(name) in ("input", "rotation")


def _kind(name: str) -> str:
    """Where a method acts: input, rotation, tables or none. Imports torch."""
    found = importlib.import_module("megatron.model.position_names")
    return str(found.positional_embedding_class(name).kind)
