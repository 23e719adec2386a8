"""Who may name code that is imported: the user, never a file that came with a checkpoint.

`pos_emb: package.module:Class` imports a module, and importing runs it. The name is obeyed when it
comes from the command line, from a YAML file outside any checkpoint or run folder, or from
`load_pretrained(allow_kernel=...)`; a class that this process has imported already needs no leave.
Folders are packages to Python: a checkpoint below the working directory could bring its own module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError

__all__ = [
    "allow_kernel",
    "check_code_keys",
    "is_allowed",
    "is_import_path",
    "is_inside_checkpoint",
    "kernels_in",
]

_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
# Beside these names, a folder is a run, a checkpoint or a Hugging Face model.
_MARKS = ("checksums.json", "metrics.jsonl", "resolved.yml")
_allowed: set[str] = set()


def is_import_path(name: str) -> bool:
    """Whether `name` has the form package.module:Class."""
    return _IMPORT_PATH.fullmatch(name) is not None


def allow_kernel(names: str | Iterable[str] | None) -> None:
    """Let `pos_emb` name these classes (package.module:Class) from now on, in this process."""
    for name in [names] if isinstance(names, str) else names or ():
        if not is_import_path(name):
            raise ConfigError(f"allow_kernel {name!r:.80}: expected package.module:ClassName.")
        _allowed.add(name)


def is_allowed(name: str) -> bool:
    """Whether the user named this class."""
    return name in _allowed


def check_code_keys(source: str | Path, values: Mapping[str, Any]) -> None:
    """Take the names of code in a config file that the user wrote; refuse them in another's.

    A file inside a run or checkpoint folder may have come with it.
    """
    named = _code_in(values)
    if not named:
        return
    if not is_inside_checkpoint(source):
        allow_kernel(kernels_in(values))
        return
    for key, value in named.items():
        if key == "pos_emb" and is_allowed(value):
            continue
        hint = f"--allow-kernel {value}" if key == "pos_emb" else f"--set {key}=..."
        raise ConfigError(
            f"{source}: {key} = {value!r:.80} names code to run, and this file lies in a "
            f"checkpoint's or run's folder, which may have come from somebody else. If the code is "
            f"yours, add {hint}."
        )


def kernels_in(values: Mapping[str, Any]) -> list[str]:
    """The classes of the user's own that a config names."""
    name = values.get("pos_emb")
    return [name] if isinstance(name, str) and is_import_path(name) else []


def _code_in(values: Mapping[str, Any]) -> dict[str, str]:
    """Keys whose values decide what is executed."""
    found: dict[str, str] = {}
    if kernels := kernels_in(values):
        found["pos_emb"] = kernels[0]
    for key in ("eval_include_path", "launcher_args"):
        if values.get(key):
            found[key] = str(values[key])
    tasks = values.get("eval_tasks")
    for task in tasks if isinstance(tasks, list) else [tasks]:
        if isinstance(task, str) and is_import_path(task):
            found["eval_tasks"] = task
    return found


def is_inside_checkpoint(path: str | Path) -> bool:
    """Whether a file lies in a run's, a checkpoint's or a Hugging Face model's folder."""
    given = Path(path).absolute()
    folders = {*given.parents, *given.resolve().parents}
    return any(_is_checkpoint_folder(folder) for folder in folders)


def _is_checkpoint_folder(folder: Path) -> bool:
    try:
        if folder.name.startswith("global_step") or any((folder / m).is_file() for m in _MARKS):
            return True
        return any(folder.glob("global_step*")) or _is_hf_folder(folder)
    except OSError:
        return True  # a folder that cannot be looked into is not known to be the user's


def _is_hf_folder(folder: Path) -> bool:
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "model_type" in content
