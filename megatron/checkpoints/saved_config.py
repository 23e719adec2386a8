"""The config inside a checkpoint: reading it, keys of older versions, and comparisons."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.errors import CheckpointError, ConfigError
from megatron.model.layer_formulas import NORM_EPSILONS, pattern_places
from megatron.neox_arguments import (
    FACTS,
    GROUPS,
    OWNER,
    NeoXArgs,
    of_the_checkpoint,
    same_on_resume,
)
from megatron.neox_arguments.catalogue import canonical_method
from megatron.neox_arguments.deepspeed_config import optimizer_family
from megatron.neox_arguments.model_keys import (
    GATED_ACTIVATIONS,
    KEYS_OF_OURS,
    ModelArgs,
    intermediate_size_for,
)
from megatron.neox_arguments.normalize import canonical_key, changes_the_model
from megatron.neox_arguments.run_keys import TokenizerArgs
from megatron.neox_arguments.yaml_files import parse_yaml, read_text

# Our own checkpoints hold the user's YAML files and the resolved config.
RESOLVED = "resolved.yml"


def is_ours(config: Mapping[str, Any]) -> bool:
    """Whether a saved config was written by this code; other programs write rope_scaling too."""
    return not (KEYS_OF_OURS - {"rope_scaling"}).isdisjoint(config)


def read_saved_config(directory: Path, root: Path) -> dict[str, Any]:
    """Flat canonical keys from `configs/*.yml` of a checkpoint, or else of its run in `root`."""
    for place in (directory, root):
        if is_ours(saved := resolved_config(place)):
            return {**saved, **values_when_saved(saved)}
        folder = place / "configs"
        if given := sorted([*folder.glob("*.yml"), *folder.glob("*.yaml")]):
            return _merge(given)
    raise CheckpointError(
        f"{directory}: no configs/*.yml inside, so the model's shape is unknown; "
        "give the config it was trained with (config=...)"
    )


def resolved_config(directory: Path) -> dict[str, Any]:
    """The resolved config in a checkpoint of ours; {} in another program's."""
    path = directory / "configs" / RESOLVED
    return read_config_file(path) if path.is_file() else {}


def read_config_file(path: Path) -> dict[str, Any]:
    """The keys of one saved file, in today's spelling."""
    if not path.is_file():
        raise CheckpointError(f"{path}: is not a regular file")
    try:
        content = parse_yaml(read_text(path), str(path))
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: is not a mapping of keys to values")
    return {canonical_key(str(key)): value for key, value in content.items()}


def _merge(files: list[Path]) -> dict[str, Any]:
    """GPT-NeoX saves the files of the command line; for the model they must agree."""
    merged: dict[str, Any] = {}
    origin: dict[str, Path] = {}
    for path in files:
        for key, value in read_config_file(path).items():
            if key in merged and merged[key] != value and _shapes(key):
                raise CheckpointError(
                    f"{key} is {merged[key]!r:.80} in {origin[key]} and {value!r:.80} in {path}: "
                    "which one describes the model? Remove one, or give config=..."
                )
            merged[key] = value
            origin[key] = path
    return merged


def _shapes(key: str) -> bool:
    """Whether a key defines the model: files may differ in the sequence length."""
    return key != "seq_length" and FACTS.get(key, {}).get("changes") == "model"


def args_from(config: NeoXArgs | Mapping[str, Any], source: Path) -> NeoXArgs:
    """The validated config.

    A saved config may hold keys about machines, data or logging that mean nothing here; the model
    does not depend on them. Keys of features that would change the model are never dropped.
    """
    if isinstance(config, NeoXArgs):
        return config
    try:
        return NeoXArgs.from_dict(config)
    except ConfigError as first:
        kept = {
            key: value
            for key, value in config.items()
            if OWNER.get(key) in ("model", "tokenizer") or changes_the_model(key)
        }
        try:
            args = NeoXArgs.from_dict({**kept, "train_micro_batch_size_per_gpu": 1})
        except ConfigError as error:
            raise CheckpointError(f"{source}: its saved config cannot be used: {error}") from error
        warnings.warn(
            f"{source}: keys of the saved config other than the model's and the tokenizer's are "
            f"ignored ({str(first).splitlines()[0]})",
            stacklevel=2,
        )
        return args


def config_to_resume(args: NeoXArgs, checkpoint: Path) -> NeoXArgs:
    """The config to resume `checkpoint` (a global_stepN) with, whatever version started it."""
    saved = resolved_config(checkpoint)
    if not is_ours(saved):
        return args
    changes = values_when_saved(saved)
    if args.optimization.override_lr_scheduler or args.checkpoint.finetune:
        changes.pop("lr_decay_rule", None)
    now = args.to_dict()
    changes = {  # a value that was changed since stays
        key: value
        for key, value in changes.items()
        if key == "lr_decay_rule" or _without_momentum(now.get(key)) == saved.get(key)
    }
    return args.replace(**changes) if changes else args


def _without_momentum(value: Any) -> Any:
    """An `optimizer` block as written before sgd had the key momentum; else the value."""
    match value:
        case {"type": "sgd", "params": {"momentum": 0.0, **params}}:
            return {"type": "sgd", "params": params}
    return value


def tokenizer_of(settings: TokenizerArgs, source: Path) -> Any:
    """The tokenizer that a checkpoint's config names; its files may be beside the checkpoint."""
    from megatron.tokenizer import build_tokenizer

    files = {
        key: _found(value, source)
        for key in ("vocab_file", "merge_file")
        if (value := getattr(settings, key)) is not None
    }
    return build_tokenizer(settings.tokenizer_type, **files)


def _found(file: str, source: Path) -> str:
    """A file of the config, or one of the same name beside the checkpoint."""
    folders = (source, source.parent, source / "tokenizer", source.parent / "tokenizer")
    places = [Path(file), *(folder / Path(file).name for folder in folders)]
    return next((str(place) for place in places if place.exists()), file)


# Runs of ours that started before a key existed keep their behaviour.
#
# A saved config of ours holds every key that has a value, so a missing key shows its age.


def values_when_saved(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Values of newer keys that keep a saved config's behaviour."""
    changes: dict[str, Any] = {}
    if "lr_decay_rule" not in saved:
        changes["lr_decay_rule"] = "earlier"
    match saved.get("optimizer"):
        case {"type": "sgd", "params": dict(params)} if "momentum" not in params:
            momentum = (params.get("betas") or [0.9])[0]
            changes["optimizer"] = {"type": "sgd", "params": {**params, "momentum": momentum}}
    if saved.get("apply_query_key_layer_scaling") and "scale_tables_by_layer" not in saved:
        changes["scale_tables_by_layer"] = False
    if "mlp_multiple_of" in saved:  # saved since we follow GPT-NeoX's rules
        return changes
    activation = saved.get("activation")
    if activation in GATED_ACTIVATIONS:  # the size was the width, in steps of 64 by default
        width = saved.get("intermediate_size") or -(-(8 * saved["hidden_size"] // 3) // 64) * 64
        changes["intermediate_size"] = intermediate_size_for(width, activation)
    if saved.get("sliding_window_width") is not None:  # the query counted
        changes["sliding_window_width"] = saved["sliding_window_width"] - 1
    if saved.get("precision") == "bf16" and "data_types" not in saved:
        changes["data_types"] = {"grad_accum_dtype": "bf16"}
    return changes


# One comparison of a given config with a checkpoint's own, key by key, before anything is loaded.
#
# Which keys must be equal is in their declarations: to resume, all that decide what a run
# computes (`same_on_resume`); to evaluate, generate and convert, those of the model
# (`of_the_checkpoint`).

SCHEDULE = {key for key, facts in FACTS.items() if "schedule" in facts} | {"optimizer.params.lr"}
"""May differ if the config chooses its own schedule or the checkpoint's."""


def check_agreement(
    directory: Path, args: NeoXArgs, *, batch_size: int | None, saved_batch_size: int | None
) -> list[str]:
    """Refuse to resume `directory` (a global_stepN) with another run's config.

    Returns messages: keys that `allow_changed` lets differ, and a longer training.
    """
    saved = resolved_config(directory)
    if not saved:
        return [f"{directory}: has no configs/{RESOLVED}; its config is not compared with this one"]
    saved |= values_when_saved(saved)
    saved |= args_from(saved, directory).model.model_dump(exclude_none=True)
    options = args.optimization
    chosen = options.override_lr_scheduler or options.use_checkpoint_lr_scheduler
    found = differences(saved, args.to_dict(), same_on_resume)
    if chosen:
        found = {key: both for key, both in found.items() if key not in SCHEDULE}
    if saved_batch_size and batch_size and saved_batch_size != batch_size:
        found["train_batch_size"] = (saved_batch_size, batch_size)
    differing = {key: describe_difference(key, *both) for key, both in found.items()}
    allowed = set(args.checkpoint.allow_changed or ())
    refused = [key for key in found if allowed.isdisjoint({key, key.partition(".")[0]})]
    if refused:
        raise CheckpointError(
            f"{directory}: this config is not the one it was trained with: "
            f"{'; '.join(differing[key] for key in refused)}. Set it back; or start a new run with "
            "another `save` (and `finetune: true` to begin from these weights); or, to continue "
            f"with the change, add allow_changed: [{', '.join(refused)}]."
        )
    lines = [f"{difference}, by allow_changed" for difference in differing.values()]
    before, now = saved.get("train_iters"), args.optimization.train_iters
    if isinstance(before, int) and now is not None and now != before:
        lines.append(
            f"train_iters is {now}, it was {before}: the rate decays over the new number unless "
            "lr_decay_iters is set, and more passes over the data would shuffle it anew"
        )
    return lines


def check_positions(saved: ModelArgs, given: ModelArgs, source: Path) -> None:
    """Refuse to begin from weights of a model with another pos_emb, or another rotation beside."""
    before, now = _methods(saved), _methods(given)
    then, here = (" + ".join(dict.fromkeys(names)) for names in (before, now))
    shares = saved.rotary_share(0), given.rotary_share(0)
    differing = ""
    if before != now and len(before) == len(now):
        differing = describe_difference("pos_emb", then, here)
        differing += ", in other layers" if then == here else ""
    elif shares[0] != shares[1]:
        differing = describe_difference("rotary_angles", *shares)
    if differing:
        raise CheckpointError(
            f"{source}: {differing}. To give the model other positions, add load_positions: fresh "
            "(docs/extend_a_rope_model.md)."
        )


def _methods(model: ModelArgs) -> list[str]:
    """The method of each layer."""
    pattern = model.layer_pattern or [{}]
    places = pattern_places(pattern, model.num_layers)
    return [canonical_method(pattern[place].get("pos_emb", model.pos_emb)) for place in places]


def check_same_model(saved: NeoXArgs, given: NeoXArgs, directory: Path, native: bool) -> None:
    """Refuse a given config that describes another model than the checkpoint's own.

    `INFERRED_FROM_WEIGHTS` are unknown before another program's weights are read.
    """
    found = differences(saved.to_dict(), given.to_dict(), of_the_checkpoint)
    differing = [describe_difference(key, *both) for key, both in found.items()
            if native or key not in INFERRED_FROM_WEIGHTS]  # fmt: skip
    if differing:
        raise CheckpointError(
            f"{directory}: this config describes another model: {'; '.join(differing)}. Use the "
            "config the checkpoint was trained with, or leave these keys out of --set; or give "
            "another checkpoint (`load`)."
        )


INFERRED_FROM_WEIGHTS = ("kerple_share", "intermediate_size")


def with_model_of(saved: NeoXArgs, given: NeoXArgs, directory: Path) -> NeoXArgs:
    """The given config with the checkpoint's model; refused where the two contradict."""
    check_same_model(saved, given, directory, native=True)
    own = saved.to_dict()
    return given.replace(**{key: own.get(key) for key in OWNER if of_the_checkpoint(key)})


def describe_difference(key: str, before: Any, now: Any) -> str:
    """Both values of a key, for a message."""
    return f"{key} is {_short(before)} in the checkpoint and {_short(now)} in the config"


def differences(
    saved: Mapping[str, Any], given: Mapping[str, Any], matters: Callable[[str], bool]
) -> dict[str, tuple[Any, Any]]:
    """The compared keys whose values differ in the two configs -> both values."""
    before, now = _compared(saved, matters), _compared(given, matters)
    return {
        key: (before.get(key), now.get(key))
        for key in before | now
        if _plain(key, before.get(key)) != _plain(key, now.get(key))
    }


def _compared(config: Mapping[str, Any], matters: Callable[[str], bool]) -> dict[str, Any]:
    """The values to compare: equivalent keys as one, `optimizer: {type, params: {...}}` one by
    one."""
    values = {key: config.get(key, default_value(key)) for key in OWNER if matters(key)}
    model = ModelArgs.model_construct(
        **{key: config.get(key, default_value(key)) for key in ModelArgs.model_fields}
    )
    values.update(intermediate_size=model.ffn_size, activation=model.activation_name)
    for key in ("mlp_multiple_of", "bias_gelu_fusion"):
        values.pop(key, None)
    for norm, key in NORM_EPSILONS.items():
        if norm != model.norm:
            values.pop(key, None)
    optimizer = values.pop("optimizer", None)
    if isinstance(optimizer, dict):
        kind, params = str(optimizer.get("type", "")), optimizer.get("params")
        values["optimizer.type"] = optimizer_family(kind)
        for name, value in params.items() if isinstance(params, dict) else ():
            values[f"optimizer.params.{name}"] = value
    return values


def default_value(key: str) -> Any:
    """The value of a key that an older version did not have, or that was left out as null."""
    default = GROUPS[OWNER[key]].model_fields[key].get_default(call_default_factory=True)
    return default.model_dump(exclude_none=True) if hasattr(default, "model_dump") else default


def _plain(key: str, value: Any) -> Any:
    """A value to compare by."""
    if key == "pos_emb" and isinstance(value, str):
        return canonical_method(value)
    if key == "layer_pattern" and value is not None:  # counts may be written in several ways
        entries = (entry for entry in value for _ in range(entry.get("count", 1)))
        return [{k: _plain(k, v) for k, v in entry.items() if k != "count"} for entry in entries]
    if "path" in FACTS.get(key, ()) and value is not None:  # the run's manifest has their contents
        return [Path(str(item)).name for item in (value if isinstance(value, list) else [value])]
    return list(value) if isinstance(value, tuple) else value


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"{value!r:.400}"
    return "not set" if value is None else f"{value!r:.80}"
