"""A model's config in Hugging Face's form and back, by the tables of `architectures.py`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.activations import ACT2FN

from megatron.checkpoints.hf.architectures import ARCHITECTURES, Architecture
from megatron.checkpoints.hf.configuration_kerple import KerpleNeoXConfig
from megatron.checkpoints.saved_config import differences
from megatron.errors import CheckpointError, KerpleError
from megatron.model import ModelSpec
from megatron.model.layer_formulas import ACTIVATIONS, GATED, NORM_EPSILONS, pattern_places
from megatron.model.position_names import canonical_name
from megatron.model.rotary_and_input_positions import SCALINGS
from megatron.neox_arguments import FACTS, NeoXArgs
from megatron.neox_arguments.catalogue import METHODS
from megatron.neox_arguments.model_keys import (
    ModelArgs,
    RopeScaling,
    hugging_face_keys,
    intermediate_size_for,
)

_WIDTH = "sliding_window_width"

# Which class an export has.


def architecture_of(spec: ModelSpec, wanted: str | None = None) -> Architecture | None:
    """The first architecture of transformers that computes exactly this model; None: only ours.

    An architecture fits if reading what it would write gives the same model.
    """
    if wanted and wanted not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"architecture {wanted!r:.80} is not known; there are {known}")
    others = [ARCHITECTURES[wanted]] if wanted else list(ARCHITECTURES.values())
    found = next((each for each in others if not _misfits(each, spec)), None)
    if wanted and found is None:
        raise CheckpointError(
            f"architecture {wanted}: transformers' {ARCHITECTURES[wanted].causal_lm} does not "
            f"compute this model: {'; '.join(_misfits(ARCHITECTURES[wanted], spec))}. Leave the "
            "architecture out to export the class that does."
        )
    return found


def _misfits(architecture: Architecture, spec: ModelSpec) -> list[str]:
    """The keys in which the model is not one of this architecture, with their values."""
    try:
        config = CONFIG_MAPPING[architecture.model_type](**_written(architecture, spec))
        read = args_from_hf(config, Path("config.json"))
    except (KerpleError, ValueError) as error:
        return [" ".join(str(error).split())]
    theirs, mine = _comparable(read.model), _comparable(spec)
    found = differences(theirs, mine, lambda key: _shapes(key, spec))
    return [f"{key} is {b!r:.60} and not {a!r:.60}" for key, (a, b) in found.items()]


def _shapes(key: str, spec: ModelSpec) -> bool:
    """Whether a key changes what a model without tables over distance computes."""
    unread = {"seq_length", "scale_tables_by_layer", "apply_query_key_layer_scaling"}
    if not spec.gpt_j_residual:
        unread.add("gpt_j_tied")
    if spec.norm != "layernorm":
        unread.add("use_bias_in_norms")
    if canonical_name(spec.pos_emb) not in ("rotary", "xpos"):
        unread |= {"rotary_pct", "rotary_emb_base", "rope_scaling"}
    of_tables = key.startswith(("kerple_", "rpe_"))
    return FACTS[key].get("changes") == "model" and key not in unread and not of_tables


def _comparable(model: ModelArgs) -> dict[str, Any]:
    """The model's keys, with the original length of a scaling and the window of every layer."""
    values = model.model_dump(exclude_none=True)
    if scaling := values.get("rope_scaling"):
        scaling.setdefault("original_max_position", model.position_rows)
    if model.layer_pattern is not None:
        width = values.pop(_WIDTH, None)
        entries = [{_WIDTH: width, **entry, "count": 1} for entry in model.layer_pattern]
        places = pattern_places(model.layer_pattern, model.num_layers)
        values["layer_pattern"] = [entries[place] for place in places]
    return values


def hf_config(
    spec: ModelSpec,
    *,
    iteration: int,
    eos: int | None,
    own_kernel: bool,
    architecture: Architecture | None,
) -> PretrainedConfig:
    """The config of that architecture; of KerpleNeoXConfig without one."""
    common = {"vocab_size": spec.padded_vocab_size, "bos_token_id": eos, "eos_token_id": eos}
    if architecture is not None:
        values = _written(architecture, spec) | common
        config: PretrainedConfig = CONFIG_MAPPING[architecture.model_type](**values)
        return config
    pos_emb = canonical_name(spec.pos_emb)
    if pos_emb not in METHODS and not own_kernel:
        raise CheckpointError(
            f"pos_emb: {spec.pos_emb!r} is a class of your own, whose source an export must hold. "
            "If its users may read and run the source: --with-kernel-source (in Python "
            "write_hf(..., with_kernel_source=True))."
        )
    scaling, temperature = spec.rope_scaling, spec.attention_temperature
    values = {key.name: getattr(spec, key.key) for key in hugging_face_keys()}
    values |= common | {
        "pos_emb": pos_emb,
        "layer_pattern": _exported_pattern(spec),
        "attention_temperature": temperature.model_dump() if temperature else None,
        "hidden_act": spec.activation_name,
        "intermediate_size": spec.ffn_size,
        "tie_word_embeddings": not spec.no_weight_tying,
        "attention_window": spec.attention_window,
        "norm_eps": getattr(spec, NORM_EPSILONS[spec.norm]),
        "apply_query_key_layer_scaling": _scales_tables(spec),
        "rotary_scaling": scaling.model_dump(exclude_none=True) if scaling else None,
        "iteration": iteration,
    }
    return KerpleNeoXConfig(**values)


def _exported_pattern(spec: ModelSpec) -> list[dict[str, Any]] | None:
    """layer_pattern with our names of positions: an export knows no others."""
    pattern = []
    for entry in spec.layer_pattern or ():
        name = canonical_name(entry.get("pos_emb", spec.pos_emb))
        if name not in METHODS:
            raise CheckpointError(
                f"layer_pattern with pos_emb: {name!r:.80}, a class of your own: the export of a "
                "pattern holds no source of yours. Convert to native."
            )
        pattern.append({**entry, "pos_emb": name} if "pos_emb" in entry else entry)
    return pattern or None


def _scales_tables(spec: ModelSpec) -> bool:
    """Whether layers scale their bias; in an export one key holds for all layers."""
    factors = [spec.table_factor(layer) for layer in range(spec.num_layers)]
    scaled = factors == [max(1, layer) for layer in range(spec.num_layers)]
    if not scaled and max(factors) > 1:
        raise CheckpointError(
            "attention_config with `flash` in some layers and apply_query_key_layer_scaling: an "
            "export scales the bias of all layers or of none. Convert to native or neox."
        )
    return scaled and max(factors) > 1


def args_from_hf(config: PretrainedConfig, source: Path) -> NeoXArgs:
    """The NeoX config of a Hugging Face folder of ours, or of one of the architectures."""
    if isinstance(config, KerpleNeoXConfig):
        values = {key.key: getattr(config, key.name) for key in hugging_face_keys()}
        values |= _from_kerple(config)
    else:
        values = _read(ARCHITECTURES[config.model_type], config, source)
    values["no_weight_tying"] = not config.tie_word_embeddings
    width = values.pop("intermediate_size")
    args = NeoXArgs.from_dict({**values, "train_micro_batch_size_per_gpu": 1})
    if args.model.ffn_size == width:  # what null means
        return args
    return args.replace(intermediate_size=intermediate_size_for(width, args.model.activation))


def _from_kerple(config: Any) -> dict[str, Any]:
    window: int | None = config.attention_window
    gated = config.hidden_act in GATED
    act = {"activation": config.hidden_act} if gated else _plain(config.hidden_act)
    return act | {
        "sliding_window_width": None if window is None else window - 1,
        NORM_EPSILONS[config.norm]: config.norm_eps,
    }


# One architecture's config, from ours and to ours.


def _written(architecture: Architecture, spec: ModelSpec) -> dict[str, Any]:
    """The values of transformers' config; what our model has besides is not looked at."""
    values = {theirs: getattr(spec, ours) for ours, theirs in architecture.keys.items()}
    values |= {theirs: getattr(spec, ours) for theirs, ours in architecture.copies.items()}
    for key, value in (("num_key_value_heads", spec.kv_heads), ("head_dim", spec.head_dim)):
        if key in values:
            values[key] = value
    values["tie_word_embeddings"] = not spec.no_weight_tying
    values[architecture.width] = spec.ffn_size
    values[architecture.activation] = _their_activation(spec, gated=_is_gated(architecture))
    if architecture.rotary != "none":
        values["rope_parameters"] = _their_rope(spec, architecture)
    if architecture.window == "sliding_window":
        values["sliding_window"] = spec.attention_window
    if architecture.window == "layer_types":
        values |= _their_windows(spec)
    return values


def _read(architecture: Architecture, config: Any, source: Path) -> dict[str, Any]:
    """Our keys of transformers' config."""
    for key, value in architecture.required.items():
        if getattr(config, key, value) != value:
            raise CheckpointError(f"{key} = {getattr(config, key)!r}: only {value} is converted")
    values = dict(architecture.implied)
    values |= {ours: getattr(config, key, None) for ours, key in architecture.keys.items()}
    for key, ours in architecture.copies.items():
        if getattr(config, key, values[ours]) != values[ours]:
            warnings.warn(
                f"{source}: {key} = {getattr(config, key)} is read as {ours} = {values[ours]}",
                stacklevel=2,
            )
    name, gated = getattr(config, architecture.activation), _is_gated(architecture)
    values |= _gated(name) if gated else _plain(name)
    width = getattr(config, architecture.width)
    values["intermediate_size"] = width or 4 * values["hidden_size"]
    values["seq_length"] = values["max_position_embeddings"]
    if architecture.rotary != "none":
        values |= _our_rope(config, architecture)
    if architecture.window == "sliding_window":
        values |= _same_window(config.sliding_window)
    if architecture.window == "layer_types":
        values |= _our_windows(config)
    return {key: value for key, value in values.items() if value is not None}


def _is_gated(architecture: Architecture) -> bool:
    return architecture.layer.get("mlp.dense_h_to_4h.") is not None and (
        architecture.layer["mlp.dense_h_to_4h."].layout == "stacked"
    )


_GELU_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_tanh")
_GATES = {
    "silu": "swiglu", "gelu": "geglu", "relu": "reglu", "sigmoid": "glu", "linear": "bilinear"
}  # fmt: skip
"""Their name of a gate's function -> our activation."""


def _plain(name: str) -> dict[str, Any]:
    if name in _GELU_TANH:
        return {"activation": "gelu", "bias_gelu_fusion": True}
    if name not in ACTIVATIONS:
        known = ", ".join([*ACTIVATIONS, *_GELU_TANH])
        raise CheckpointError(f"hidden_act {name!r:.80} is not known here; there are {known}")
    return {"activation": name}


def _gated(name: str) -> dict[str, Any]:
    name = "silu" if name == "swish" else name
    if name not in _GATES:
        raise CheckpointError(
            f"hidden_act {name!r:.80} of a gated MLP is not known here; there are "
            f"{', '.join(_GATES)}"
        )
    return {"activation": _GATES[name]}


def _their_activation(spec: ModelSpec, *, gated: bool) -> str:
    name = spec.activation_name
    names = {ours: theirs for theirs, ours in _GATES.items()}
    if not gated:
        names = {each: each for each in ACTIVATIONS if each in ACT2FN}
        names["gelu_tanh"] = _GELU_TANH[0]
    if name not in names:
        raise CheckpointError(f"activation = {name} is not one of {', '.join(names)}")
    return names[name]


_NOT_THEIR_ROPE = ("ntk", "clipped")
_ROPE_NAMES = {"type": "rope_type", "original_max_position": "original_max_position_embeddings"}
_WITH_ORIGINAL = ("yarn", "longrope", "llama3")  # the others take max_position_embeddings


def _their_rope(spec: ModelSpec, architecture: Architecture) -> dict[str, Any]:
    given = spec.rope_scaling.model_dump(exclude_none=True) if spec.rope_scaling else {}
    rope = {_ROPE_NAMES.get(key, key): value for key, value in given.items()}
    rope = {"rope_type": "default", "rope_theta": float(spec.rotary_emb_base), **rope}
    kind = rope["rope_type"]
    if kind in _NOT_THEIR_ROPE:
        raise CheckpointError(f"rope_scaling type {kind}: transformers has no such rope_type")
    if kind in _WITH_ORIGINAL:
        rope.setdefault("original_max_position_embeddings", spec.position_rows)
    if architecture.rotary == "part" or kind == "proportional":
        rope["partial_rotary_factor"] = spec.rotary_pct
    return rope


def _our_rope(config: Any, architecture: Architecture) -> dict[str, Any]:
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise CheckpointError("rope_parameters by layer type are not converted; one for all is")
    kind = rope.get("rope_type", "default")
    share: Any = rope.get("partial_rotary_factor")
    if share is None:
        share = getattr(config, "rotary_pct", 1.0)
    if architecture.rotary == "whole" and share != 1 and kind != "proportional":
        raise CheckpointError(f"partial_rotary_factor = {share}: {config.model_type} has only 1.0")
    base: Any = rope.get("rope_theta") or getattr(config, "rotary_emb_base", 10000)
    values = {"rotary_pct": float(share), "rotary_emb_base": float(base)}
    if kind == "default":
        return values
    converted = ["default", *(name for name in SCALINGS if name not in _NOT_THEIR_ROPE)]
    if kind not in converted:
        known = ", ".join(converted)
        raise CheckpointError(f"rope_type {kind!r:.80} is not converted; there are {known}")
    back = {theirs: ours for ours, theirs in _ROPE_NAMES.items()}
    given = {
        back.get(key, key): value
        for key, value in rope.items()
        if value is not None and key not in ("type", "rope_theta", "partial_rotary_factor")
    }
    if kind not in _WITH_ORIGINAL:
        given.pop("original_max_position", None)
    if unknown := sorted(set(given) - set(RopeScaling.model_fields)):
        raise CheckpointError(
            f"rope_parameters: {unknown[0]} = {given[unknown[0]]!r:.60} is not converted; there "
            f"are {', '.join(RopeScaling.model_fields)}"
        )
    return {**values, "rope_scaling": given}


# Windows. Theirs count the query's own key, sliding_window_width does not.

_FULL, _SLIDING = "full_attention", "sliding_attention"


def _their_windows(spec: ModelSpec) -> dict[str, Any]:
    """Which layers slide; the model's own keys where it has no layer_pattern."""
    if {key for entry in spec.layer_pattern or () for key in entry} - {"count", _WIDTH}:
        raise CheckpointError(f"layer_pattern sets more than {_WIDTH}: their layers differ in that")
    entries = [{_WIDTH: spec.sliding_window_width, **entry} for entry in spec.layer_pattern or [{}]]
    widths = [entries[place][_WIDTH] for place in pattern_places(entries, spec.num_layers)]
    used = {width for width in widths if width is not None}
    if len(used) > 1:
        raise CheckpointError(f"{_WIDTH} is {sorted(used)} in layers: theirs have one window")
    return {
        "use_sliding_window": bool(used),
        "sliding_window": used.pop() + 1 if used else None,
        "layer_types": [_FULL if width is None else _SLIDING for width in widths],
    }


def _our_windows(config: Any) -> dict[str, Any]:
    """A window of all layers, or a layer_pattern where some layers see everything."""
    kinds: list[str] = config.layer_types
    if unknown := sorted(set(kinds) - {_FULL, _SLIDING}):
        raise CheckpointError(
            f"layer_types: {unknown[0]!r:.60} is not converted; there are {_FULL} and {_SLIDING}"
        )
    window: int | None = config.sliding_window
    if window is None or _SLIDING not in kinds:
        return {}
    if _FULL not in kinds:
        return _same_window(window)
    runs = [(kind, len(list(run))) for kind, run in groupby(kinds)]
    pattern = [
        {"count": count, _WIDTH: window - 1 if kind == _SLIDING else None} for kind, count in runs
    ]
    return {"layer_pattern": pattern}


def _same_window(window: int | None) -> dict[str, Any]:
    return {} if window is None else {_WIDTH: window - 1}
