"""Result files: the measurements with their settings, in one format for all tasks.

    <prefix>_<task>.json                     a result
    <prefix>_<task>.<settings>.json          the same task under other settings: another file
    <prefix folder>/cache/<task>-<key>.json  every finished result, by what it depends on
    <prefix folder>/cache/<task>-<key>.part  the cells of an unfinished one

The key is a hash of the checkpoint's files, the model and the task's parameters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from megatron.atomic_files import CHECKSUMS, fingerprint, read_json, write_text
from megatron.errors import EvaluationError

if TYPE_CHECKING:
    from megatron.mpu.job import Ranks

FORMAT = 2
"""1 (before `settings`, `checkpoint_id` and `version` were recorded) is still read."""
MODEL_KEYS = ("rope_scaling", "kerple_legacy_bf16", "kerple_legacy_fp16")
"""Model keys that an evaluation may change after training, and that change its numbers."""
Content = dict[str, Any]


# The form of a result.


class OpenModel(BaseModel):
    """Tasks may add fields of their own."""

    model_config = ConfigDict(extra="allow")


class _DataEntry(OpenModel):
    prefix: str
    share: str | None = None


class _Settings(OpenModel):
    """The part of the settings that every task records in the same form."""

    data: list[_DataEntry] | None = None
    model: Content | None = None


class Result(OpenModel):
    """One result file. `settings`, `checkpoint_id` and `version` are None in files of format 1."""

    format: int
    task: str
    iteration: int
    pos_emb: str
    seed: int
    train_length: int
    results: Content
    checkpoint: str = ""
    data_seed: int | None = None
    protocol: str | None = None
    parameters: int | None = None
    window: int | None = None
    errors: list[Content] = []
    settings: Content | None = None
    checkpoint_id: str | None = None
    version: str | None = None


def read_result(path: Path) -> Result:
    """A result with a checked header; `results` is checked by its task's `cells`."""
    try:
        result = Result.model_validate_json(path.read_bytes())
        _Settings.model_validate(result.settings or {})
    except (ValidationError, OSError) as error:
        raise not_a_result(path, error) from error
    return result


def not_a_result(path: Path, error: Exception) -> EvaluationError:
    """What is wrong with a file, in one line with its name."""
    problem = first_problem(error) if isinstance(error, ValidationError) else repr(error)
    return EvaluationError(f"{path}: not a result file: {problem}")


def first_problem(error: ValidationError) -> str:
    """The place of a file's first mistake, and what is wrong there."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else first["msg"]


def recorded_settings(parameters: Mapping[str, Any], model: Mapping[str, Any]) -> Content:
    """A task's parameters as recorded in its result, to distinguish results.

    Data files are identified by name, share and size; not by time, which a copy changes.
    """
    settings: Content = json.loads(json.dumps(parameters))
    files = settings.pop("files", None)
    if files is not None:
        settings["data"] = [
            {"split": split, "prefix": prefix, "share": share, "bytes": state[0] if state else None}
            for split, prefix, share, state in files
        ]
    settings["model"] = {key: model[key] for key in MODEL_KEYS if model.get(key)}
    return settings


def weights_id(checkpoint: Path) -> str | None:
    """A hash of the weights' checksums; None without checksums or without the checkpoint."""
    sums = read_json(checkpoint / CHECKSUMS)
    if not sums:
        return None
    return fingerprint({name: sums[name] for name in sums if "optim_states" not in name})


# Files.


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Atomically; in the order given, and without NaN, which is not JSON."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


class Cells:
    """The parts of one task's result, each written as soon as it is known."""

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self._path, self._ranks = path, ranks
        saved = read_json(path) if ranks.is_main else None
        self._cells: dict[str, Any] = ranks.broadcast((saved or {}).get("cells", {}))
        self.resumed = len(self._cells)
        self._tried = False
        self.errors: list[dict[str, Any]] = []

    @property
    def all_failed(self) -> bool:
        """Whether parts were tried, and none could be measured."""
        return self._tried and not self._cells

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        """The named part, computed unless an interrupted run already did."""
        self._tried = True
        if name not in self._cells:
            self._cells[name] = compute()
            if self._ranks.is_main:
                write_json(self._path, {"cells": self._cells})
        return self._cells[name]

    def grid(self, compute: Callable[..., Any], **axes: Sequence[Any]) -> Iterator[Any]:
        """The parts at all points of the axes; what cannot be done is noted in `errors`."""
        for point in product(*axes.values()):
            where = dict(zip(axes, point, strict=True))
            try:
                cell = self.get("/".join(map(str, point)), partial(compute, **where))
            except ValueError as error:
                self.errors.append({**where, "error": str(error)})
            else:
                yield cell

    def discard(self) -> None:
        """Delete the parts: the complete result has been written."""
        if self._ranks.is_main:
            self._path.unlink(missing_ok=True)


class ResultStore:
    """The result files of one checkpoint under one prefix."""

    def __init__(self, prefix: Path, ranks: Ranks) -> None:
        self._prefix, self._ranks = prefix, ranks
        self.cache_folder = prefix.parent / "cache"
        if ranks.is_main:
            try:
                self.cache_folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise EvaluationError(
                    f"eval_results_prefix {prefix}: cannot write there ({error}); "
                    "set eval_results_prefix to another place"
                ) from error

    def path(self, name: str, settings: Mapping[str, Any]) -> Path:
        """The task's own file; beside it if that holds a result of other settings."""
        plain = self._prefix.with_name(f"{self._prefix.name}_{name}.json")
        if not plain.exists() or (read_json(plain) or {}).get("settings") == settings:
            return plain
        return plain.with_suffix(f".{fingerprint(settings)[:8]}.json")

    def finished(self, name: str, key: str) -> Content | None:
        """An earlier result under the same key."""
        kept = read_json(self._cached(name, key)) if self._ranks.is_main else None
        return self._ranks.broadcast(kept)

    def cells(self, name: str, key: str) -> Cells:
        return Cells(self._cached(name, key).with_suffix(".part"), self._ranks)

    def publish(self, name: str, key: str, content: Mapping[str, Any]) -> None:
        """Write a finished result under its key and as the one of its settings."""
        if self._ranks.is_main:
            write_json(self._cached(name, key), content)
            path = self.path(name, content["settings"])
            if read_json(path) != content:
                write_json(path, content)

    def _cached(self, name: str, key: str) -> Path:
        safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)
        return self.cache_folder / f"{safe}-{key}.json"
