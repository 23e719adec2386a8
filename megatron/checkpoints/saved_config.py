"""The config that was saved inside a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoints.earlier_runs import meaning_then
from megatron.checkpoints.layouts import Layout
from megatron.errors import CheckpointError, ConfigError
from megatron.model.spec import ModelSpec
from megatron.neox_arguments import OWNER, NeoXArgs
from megatron.neox_arguments.foreign_keys import changes_the_model
from megatron.neox_arguments.model_keys import KEYS_OF_OURS
from megatron.neox_arguments.normalize import canonical_key
from megatron.neox_arguments.values import facts_of
from megatron.neox_arguments.yaml_files import parse_yaml, read_text

__all__ = [
    "OURS_ALONE",
    "RESOLVED",
    "args_from",
    "as_it_began",
    "is_ours",
    "read_saved_config",
    "tokenizer_of",
]

# Keys that tell our own files: others may have rope_scaling in them by another hand.
OURS_ALONE = KEYS_OF_OURS - {"rope_scaling"}
# Files that disagree on these still describe one model.
_NOT_SHAPING = {"seq_length", "seq_length_val", "attention_config", "make_vocab_size_divisible_by"}
_MODEL_KEYS = {
    key
    for key, field in ModelSpec.model_fields.items()
    if key not in _NOT_SHAPING and facts_of(field).get("effect") != "none"
}
_NEEDED_GROUPS = ("model", "tokenizer")
# Our own checkpoints hold the user's YAML files and beside them what they came to.
RESOLVED = "resolved.yml"


def is_ours(config: Mapping[str, Any]) -> bool:
    """Whether a saved config was written by this code."""
    return not OURS_ALONE.isdisjoint(config)


def read_saved_config(layout: Layout) -> dict[str, Any]:
    """Flat canonical keys from `configs/*.yml` of the checkpoint (or of its run)."""
    for folder in (layout.directory / "configs", layout.root / "configs"):
        files = sorted([*folder.glob("*.yml"), *folder.glob("*.yaml")])
        resolved = next((path for path in files if path.name == RESOLVED), None)
        if resolved is not None and is_ours(saved := read_config_file(resolved)):
            return {**saved, **meaning_then(saved)}
        if files:
            return _merge(files)
    raise CheckpointError(
        f"{layout.directory}: no configs/*.yml inside, so the model's shape is unknown; "
        "give the config it was trained with (config=...)"
    )


def read_config_file(path: Path) -> dict[str, Any]:
    """The keys of one saved file, in today's spelling."""
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
            if key in _MODEL_KEYS and key in merged and merged[key] != value:
                raise CheckpointError(
                    f"{key} is {merged[key]!r:.80} in {origin[key]} and {value!r:.80} in {path}: "
                    "which one describes the model? Remove one, or give config=..."
                )
            merged[key] = value
            origin[key] = path
    return merged


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
            if OWNER.get(key) in _NEEDED_GROUPS or changes_the_model(key)
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


def as_it_began(args: NeoXArgs, checkpoint: Path) -> NeoXArgs:
    """The config to resume `checkpoint` (a global_stepN) with, whenever its run began."""
    file = checkpoint / "configs" / RESOLVED
    saved = read_config_file(file) if file.is_file() else {}
    if not is_ours(saved):
        return args
    changes = meaning_then(saved)
    if args.optimization.override_lr_scheduler or args.checkpoint.finetune:
        changes.pop("lr_decay_rule", None)
    now = args.to_dict()
    changes = {  # a value that was changed since is what it says
        key: value
        for key, value in changes.items()
        if key == "lr_decay_rule" or now.get(key) == saved.get(key)
    }
    return args.replace(**changes) if changes else args


def tokenizer_of(args: NeoXArgs, source: Path) -> Any:
    """The tokenizer that a checkpoint's config names; its files may lie beside the checkpoint."""
    from megatron.tokenizer import build_tokenizer

    settings = args.tokenizer
    files = {
        key: _found(value, source)
        for key in ("vocab_file", "merge_file")
        if (value := getattr(settings, key, None)) is not None
    }
    return build_tokenizer(settings.tokenizer_type, **files)


def _found(file: str, source: Path) -> str:
    """A file of the config, or one of the same name beside the checkpoint."""
    if Path(file).exists():
        return file
    for folder in (source, source.parent, source / "tokenizer", source.parent / "tokenizer"):
        if (folder / Path(file).name).exists():
            return str(folder / Path(file).name)
    return file
