"""Which imports a config may cause: those the user named, never those of a checkpoint's files.

`pos_emb: package.module:Class` (and `optimizer.type`) imports a module, which executes it. The
name is accepted from the command line, from a YAML file outside any checkpoint or run folder, from
`load_pretrained(allow_kernel=...)` and from a call of `kernel("package.module:Class")`; a class
whose module is imported already is always accepted. Python imports folders as packages, so a
checkpoint below the working directory could contain the module.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.atomic_files import CHECKSUMS, read_json
from megatron.errors import ConfigError, KerpleError
from megatron.neox_arguments.layer_pattern import positions_named

TAG = re.compile(r"global_step(0|[1-9]\d{0,17})")
"""The name of a step's checkpoint."""
# Names of a checkpoint's files, by which `checkpoints.reading` finds weights and this module tells
# that a folder is a checkpoint. At most five digits: a name must not stand for a billion others.
LAYER_FILE = re.compile(r"^layer_(\d{1,5})-model_(\d{1,5})-model_states\.pt$")
RANK_FILE = re.compile(r"^mp_rank_(\d{1,5})_model_states\.pt$")
ZERO_FILE = re.compile(r"zero_pp_rank_(\d{1,5})_mp_rank_(\d{1,5})_(optim|model)_states\.pt$")
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
# Beside these names, a folder is a run, a checkpoint or a Hugging Face model.
_MARKS = frozenset({CHECKSUMS, "metrics.jsonl", "resolved.yml", "latest", "universal.json"})
_allowed: set[str] = set()


def is_import_path(name: str) -> bool:
    """Whether `name` has the form package.module:Class."""
    return _IMPORT_PATH.fullmatch(name) is not None


def allow_kernel(names: str | Iterable[str] | None) -> None:
    """Let a config name these classes (package.module:Class) from now on, in this process."""
    for name in [names] if isinstance(names, str) else names or ():
        if not is_import_path(name):
            raise ConfigError(f"allow_kernel {name!r:.80}: expected package.module:ClassName.")
        _allowed.add(name)


def allow_flags(values: Mapping[str, Any]) -> str:
    """The flags that let a command import this config's classes; with a leading space."""
    classes = [*classes_in(values), *_tasks_in(values)]
    return "".join(f" --allow-kernel {name}" for name in classes)


def is_allowed(name: str) -> bool:
    """Whether the user named this class."""
    return name in _allowed


def without_code(source: str | Path, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a config file; without those that name programs if it is in a run's folder.

    A file inside a run or checkpoint folder may have come with it.
    """
    classes = [*classes_in(values), *_tasks_in(values)]
    programs = [key for key in ("eval_include_path", "launcher_args") if values.get(key)]
    if not classes and not programs:
        return values
    if not is_inside_checkpoint(source):
        allow_kernel(classes_in(values))
        return values
    for name in classes:
        if is_allowed(name):
            continue
        raise ConfigError(
            f"{source}: {name!r:.80} names a class to import, and this file is in a "
            f"checkpoint's or run's folder, which may have another author. If the class "
            f"is yours, add --allow-kernel {name:.80}."
        )
    for key in programs:
        print(
            f"warning: {source}: {key} is ignored, because it names programs and the file is "
            f"in a checkpoint's or run's folder; give it with --set {key}=...",
            file=sys.stderr,
        )
    return {key: value for key, value in values.items() if key not in programs}


def classes_in(values: Mapping[str, Any]) -> list[str]:
    """The classes of the user's own that a config names as pos_emb or optimizer.type."""
    optimizer = values.get("optimizer")
    named = [values.get("pos_emb"), optimizer.get("type") if isinstance(optimizer, dict) else None]
    named += positions_named(values)
    return [name for name in named if isinstance(name, str) and is_import_path(name)]


def imported_class(key: str, name: str, error: type[KerpleError] = ConfigError) -> Any:
    """The class `package.module:Class` that a key names: the user must have named it.

    A class whose module this process has imported already runs nothing.
    """
    module_name, _, class_name = name.partition(":")
    module = sys.modules.get(module_name)
    if module is not None and class_name in vars(module):
        return vars(module)[class_name]
    if not is_import_path(name):
        raise error(f"{key}: {name!r:.80} is not of the form package.module:ClassName.")
    if not is_allowed(name):
        raise error(
            f"{key}: {name!r:.80} names a class to import, which a file that came with a "
            f"checkpoint may not do. If the class is yours, add --allow-kernel {name:.80} (in "
            f"Python: import its module first, or load_pretrained(..., allow_kernel={name!r:.80}))."
        )
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as problem:
        raise error(
            f"{key}: {name!r} cannot be imported ({problem}); "
            "check that the module is on PYTHONPATH and defines the class."
        ) from problem


def _tasks_in(values: Mapping[str, Any]) -> list[str]:
    tasks = values.get("eval_tasks")
    listed = tasks if isinstance(tasks, list) else [tasks]
    return [task for task in listed if isinstance(task, str) and is_import_path(task)]


def is_inside_checkpoint(path: str | Path) -> bool:
    """Whether a file is in a run's, a checkpoint's or a Hugging Face model's folder.

    Or beside one that holds weights: a renamed `global_stepN` with the config next to it.
    """
    given = Path(path).absolute()
    for place in (given, given.resolve()):
        above = place.parent.parent if place.parent.name == "configs" else place.parent
        if any(_is_checkpoint_folder(folder) for folder in place.parents):
            return True
        if any(is_weight_file(file.name) for file in above.glob("*/*")):
            return True
    return False


def _is_checkpoint_folder(folder: Path) -> bool:
    try:
        names = os.listdir(folder)  # noqa: PTH208
    except OSError:
        return True  # a folder that cannot be listed is not known to be the user's
    return (
        folder.name.startswith("global_step")
        or not _MARKS.isdisjoint(names)
        or any(name.startswith("global_step") or is_weight_file(name) for name in names)
        or "model_type" in (read_json(folder / "config.json") or {})
    )


def is_weight_file(name: str) -> bool:
    """Whether the loader would read weights or optimizer states from a file of this name."""
    patterns = (LAYER_FILE, RANK_FILE, ZERO_FILE)
    return any(pattern.search(name) for pattern in patterns) or (
        name.endswith(".safetensors") or (name.startswith("pytorch_model") and name[-4:] == ".bin")
    )
