"""The form of a suite file, checked once when it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron.errors import ReproduceError
from megatron.paper.cells import Rounding
from megatron.paper.tables import Layout

__all__ = [
    "DataFile",
    "ModelFile",
    "PositionwiseFile",
    "SectionFile",
    "SpeedFile",
    "SuiteFile",
    "TableFile",
    "available_suites",
    "read_suite_file",
]

SUITE_DIRECTORY = Path(__file__).resolve().parent / "suites"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelFile(_Strict):
    """A model with its training recipe; `config` holds ordinary NeoX keys."""

    extends: str | None = None
    gpus: int | None = Field(default=None, ge=1)
    config: dict[str, Any]


class DataFile(_Strict):
    title: str
    published: str | None = None
    """The paper's data set whose numbers are printed beside ours."""
    source: str | None = None
    """Name for prepare_data.py, if it is not the data set's own."""
    raw_gigabytes: float | None = None
    prepare: list[str] = []
    """Further arguments for prepare_data.py, for instance --input."""
    config: dict[str, Any] = {}


class PositionwiseFile(_Strict):
    data: str
    methods: list[str]
    length: int = Field(ge=1)
    window: int | None = Field(default=None, ge=1)


class TableFile(_Strict):
    layout: Layout
    caption: str
    rounding: Rounding = Rounding.REFERENCE
    integer_methods: list[str] = []
    full_labels: bool = False
    lengths: list[int] | None = None
    mark_best: bool = True
    mark_significance: bool = True
    published: str | None = None
    published_train_length: int = 512


class SpeedFile(_Strict):
    caption: str
    data: list[str] | None = None


class SectionFile(_Strict):
    title: str
    models: list[str]
    methods: list[str]
    data: list[str]
    seeds: list[int] | None = None
    lengths: list[int] | dict[str, list[int]] = []
    positionwise: list[PositionwiseFile] = []
    table: TableFile | None = None
    speed: SpeedFile | None = None


class SuiteFile(_Strict):
    about: str
    seeds: list[int]
    splits: list[str] = ["valid"]
    models: dict[str, ModelFile]
    data: dict[str, DataFile]
    sections: dict[str, SectionFile]
    method_config: dict[str, dict[str, Any]] = {}
    """Keys that only some methods need, by method."""


def available_suites() -> list[str]:
    return sorted(path.stem for path in SUITE_DIRECTORY.glob("*.yml"))


def _suite_path(name: str) -> Path:
    if name.endswith((".yml", ".yaml")):
        return Path(name)
    return SUITE_DIRECTORY / f"{name}.yml"


def read_suite_file(name: str) -> SuiteFile:
    """Read a shipped suite by name, or a user's own by its path (ending in .yml)."""
    path = _suite_path(name)
    if not path.is_file():
        known = ", ".join(available_suites())
        raise ReproduceError(
            f"no suite {name!r}: use one of {known}, or the path of your own .yml file"
        )
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        suite = SuiteFile.model_validate(content)
    except yaml.YAMLError as error:
        raise ReproduceError(f"{path}: not valid YAML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ReproduceError(f"{path}: {place}: {first['msg']}") from error
    _check_names(path, suite)
    return suite


def _check_names(path: Path, suite: SuiteFile) -> None:
    """Every model and data set that a section names must exist."""
    for name, section in suite.sections.items():
        for kind, used, known in (
            ("models", section.models, suite.models),
            ("data", section.data, suite.data),
            ("positionwise data", [item.data for item in section.positionwise], suite.data),
        ):
            for item in used:
                if item not in known:
                    options = ", ".join(known)
                    raise ReproduceError(
                        f"{path}: section {name}: {kind}: {item!r} is not defined (have {options})"
                    )
    for name, model in suite.models.items():
        if model.extends is not None and model.extends not in suite.models:
            raise ReproduceError(
                f"{path}: model {name} extends {model.extends!r}, which does not exist"
            )
