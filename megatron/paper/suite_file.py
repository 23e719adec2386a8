"""The form of a suite file, checked once when it is read: models, data sets, sections, tables."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from megatron.errors import ReproduceError, did_you_mean
from megatron.evaluation.results_schema import first_problem
from megatron.neox_arguments import OWNER, allowed_code
from megatron.neox_arguments.normalize import canonical_key
from megatron.neox_arguments.yaml_files import parse_yaml, read_text

SUITE_DIRECTORY = Path(__file__).resolve().parent / "suites"
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*")
"""No path separators, no leading dot."""


PERPLEXITY, POSITIONWISE = "extrapolation", "positionwise"
"""The tasks that the format itself has keys for: `table` and `variants`; `positionwise`."""
BESIDE = "In small type: the paper's numbers."
"""Added to the caption of such a table."""


class Rounding(str, Enum):
    """How the paper rounds "mean ± std"."""

    REFERENCE = "reference"
    """Mean to three digits; deviation to the decimals of the data set's best mean (main table)."""
    MAGNITUDE = "magnitude"
    """Mean to three digits, deviation to the same decimals (Gaussian table)."""
    INTEGER = "integer"
    """Whole numbers, small deviations to one decimal (the sinusoidal column)."""
    TWO_DECIMALS = "two_decimals"
    """WikiText-103."""
    THREE_DECIMALS = "three_decimals"
    """Seconds per step."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Layout(str, Enum):
    STACKED = "stacked"
    """One block per data set, methods as columns, lengths as rows (main, Gaussian, long, large)."""
    SIDE_BY_SIDE = "side_by_side"
    """One block, data sets as column groups (complicated kernels)."""
    BY_METHOD = "by_method"
    """Methods as rows, lengths as columns grouped by training length (WikiText-103)."""


class Model(_Strict):
    """A model with its training recipe; `config` holds ordinary NeoX keys."""

    extends: str | None = None
    continues: str | None = None
    """MODEL.METHOD: training begins with the weights of that run of the same data and seed."""
    gpus: int | None = Field(default=None, ge=1)
    config: dict[str, Any]


class DataSet(_Strict):
    """A data set, how prepare_data.py makes it, and the paper's that it is shown beside."""

    name: str = ""
    """The key in the suite file."""
    title: str = ""
    published: str | None = None
    """The paper's data set whose numbers are printed beside ours."""
    source: str | None = None
    """Name for prepare_data.py, if it is not the data set's own."""
    raw_gigabytes: float | None = None
    prepare: list[str] = []
    """Further arguments for prepare_data.py, for instance --input."""
    config: dict[str, Any] = {}

    def prefix(self, data_root: Path) -> str:
        """Where its tokens are."""
        source = self.source or self.name
        return f"{data_root.as_posix()}/{source}/{source}_text_document"


class Point(_Strict):
    """A model trained at one length and evaluated at another."""

    train_length: int
    """0: the training length of the data set's runs."""
    length: int

    @property
    def multiple(self) -> float:
        return self.length / self.train_length


class Positionwise(_Strict):
    data: str
    methods: list[str]
    length: int = Field(ge=1)
    window: int | None = Field(default=None, ge=1)


class Variant(_Strict):
    """The trained models evaluated once more with other model settings."""

    methods: list[str]
    config: dict[str, Any]


class TableSpec(_Strict):
    """What a table shows. The last four follow from its section and are not in the file."""

    layout: Layout
    caption: str
    rounding: Rounding = Rounding.REFERENCE
    integer_methods: tuple[str, ...] = ()
    full_labels: bool = True
    """No effect any more: a method has one name everywhere."""
    lengths: tuple[int, ...] | None = None
    mark_best: bool = True
    mark_significance: bool = True
    only_measured: bool = False
    """Without columns that have no result at all."""
    published: str | None = None
    """The paper's table whose numbers stand beside ours."""
    published_train_length: int = 512
    beside: str = BESIDE
    """Said where the paper's numbers are shown; not in LaTeX, which has ours alone."""
    key: str = ""
    methods: tuple[str, ...] = ()
    data: tuple[DataSet, ...] = ()
    points: tuple[Point, ...] = ()


class Speed(_Strict):
    caption: str
    data: list[str] | None = None


class Section(_Strict):
    """A part of the suite: its runs, its evaluations, and what the report shows of them."""

    name: str = ""
    """The key in the suite file."""
    title: str
    models: list[str]
    methods: list[str]
    data: list[str]
    seeds: list[int] | None = None
    lengths: list[int] | dict[str, list[int]] = []
    positionwise: list[Positionwise] = []
    variants: dict[str, Variant] = {}
    tasks: list[str] = [PERPLEXITY]
    """What evaluate.py does at the section's lengths."""
    table: TableSpec | None = None
    speed: Speed | None = None

    def lengths_of(self, model: str) -> list[int]:
        if isinstance(self.lengths, dict):
            return list(self.lengths.get(model, []))
        return list(self.lengths)

    @property
    def all_tasks(self) -> list[str]:
        """Those at its lengths, then those at lengths of their own."""
        return [*self.tasks, *([POSITIONWISE] if self.positionwise else [])]

    @property
    def speed_data(self) -> list[str]:
        return (self.speed.data or self.data) if self.speed else []


class Pair(_Strict):
    """Two kinds of runs, each as MODEL.DATA.METHOD, `@VARIANT` behind it where it has one."""

    label: str
    first: str
    second: str


class Contrast(_Strict):
    """A question that pairs of runs answer, seed by seed."""

    title: str
    pairs: list[Pair] = []
    """Perplexity of the first against the second's."""
    curve_lengths: list[int] = []
    """A figure of the pairs against training tokens, a line for each of these lengths."""
    curve_task: str = ""
    """Drawn below that figure: this task's result at the training length."""
    growth: dict[str, str] = {}
    """Label -> a kind of runs: perplexity at the longest length against that at 1x."""
    beyond: dict[str, str] = {}
    """Label -> a kind of runs: loss beyond the training length against its own in a window."""


class SuiteFile(_Strict):
    about: str
    seeds: list[int]
    splits: list[Literal["valid", "test"]] = Field(default=["valid"], min_length=1)
    models: dict[str, Model]
    data: dict[str, DataSet]
    sections: dict[str, Section]
    method_config: dict[str, dict[str, Any]] = {}
    """Keys that only some methods need, by method."""
    contrasts: dict[str, Contrast] = {}
    differs: list[str] = []
    """What is not as in the paper, for the report's page."""

    @field_validator("data", "sections")
    @classmethod
    def _name_parts(cls, parts: dict[str, Any]) -> dict[str, Any]:
        """Give data sets and sections their keys as names."""
        return {name: part.model_copy(update={"name": name}) for name, part in parts.items()}


def available_suites() -> list[str]:
    return sorted(path.stem for path in SUITE_DIRECTORY.glob("*.yml"))


def read_suite_file(name: str) -> SuiteFile:
    """Read a shipped suite by name, or a user's own by its path (ending in .yml)."""
    own = name.endswith((".yml", ".yaml"))
    path = Path(name) if own else SUITE_DIRECTORY / f"{name}.yml"
    if not path.is_file() or (not own and name not in available_suites()):
        known = ", ".join(available_suites())
        raise ReproduceError(
            f"no suite {name!r}: use one of {known}, or the path of your own .yml file"
        )
    content = parse_yaml(read_text(path), str(path))
    if not isinstance(content, dict):
        keys = ", ".join(SuiteFile.model_fields)
        raise ReproduceError(f"{path}: not a suite, which is a mapping of keys: {keys}")
    try:
        suite = SuiteFile.model_validate(content)
    except ValidationError as error:
        raise ReproduceError(f"{path}: {_problem(error)}") from error
    _check_names(path, suite)
    _check_tasks(path, suite)
    _check_file_names(path, suite)
    _check_extends(path, suite)
    _check_data_only(path, suite)
    return suite


_FORMS: dict[Any, type[BaseModel]] = {
    "models": Model, "data": DataSet, "sections": Section, "positionwise": Positionwise,
    "variants": Variant, "table": TableSpec, "speed": Speed, "contrasts": Contrast, "pairs": Pair,
}  # fmt: skip


def _problem(error: ValidationError) -> str:
    """The first unknown key with the nearest that exists; else the first mistake of any kind."""
    for found in error.errors():
        *place, key = found["loc"]
        if found["type"] == "extra_forbidden":
            form = next((_FORMS[part] for part in reversed(place) if part in _FORMS), SuiteFile)
            hint = did_you_mean(
                str(key), form.model_fields, f"Keys: {', '.join(form.model_fields)}."
            )
            where = "".join(f"{part}." for part in place).removesuffix(".")
            return f"{where + ': ' if where else ''}unknown key {key!r:.80}. {hint}"
    return first_problem(error)


def _methods(parts: Iterable[Positionwise | Variant]) -> list[str]:
    return [method for part in parts for method in part.methods]


def _check_names(path: Path, suite: SuiteFile) -> None:
    """Every model, data set and method that is named exists, and no name is taken twice."""
    for name, section in suite.sections.items():
        for kind, used, known in (
            ("models", section.models, suite.models),
            ("data", section.data, suite.data),
            ("positionwise data", [item.data for item in section.positionwise], suite.data),
            ("speed data", section.speed_data, suite.data),
            ("positionwise methods", _methods(section.positionwise), section.methods),
            ("variants' methods", _methods(section.variants.values()), section.methods),
        ):
            for item in used:
                if item not in known:
                    options = ", ".join(known)
                    raise ReproduceError(
                        f"{path}: section {name}: {kind}: {item!r} is not defined (have {options})"
                    )
    for name in suite.contrasts:
        if name in suite.sections:
            raise ReproduceError(
                f"{path}: contrasts: {name}: a section has this name, and their tables would "
                "be written over each other; choose another"
            )


def _check_tasks(path: Path, suite: SuiteFile) -> None:
    """A task is known by name; a class is imported only if the user named it, too."""
    from megatron.evaluation.task_registry import own_tasks  # imports torch

    for section, name in (
        (part.name, name) for part in suite.sections.values() for name in part.tasks
    ):
        if name in own_tasks() or allowed_code.is_allowed(name):
            continue
        if allowed_code.is_import_path(name):
            raise ReproduceError(
                f"{path}: section {section}: tasks: {name!r:.80} names a class to import; if the "
                f"class is yours, add --allow-kernel {name:.80}"
            )
        raise ReproduceError(
            f"{path}: section {section}: tasks: {name!r:.80} is unknown "
            f"(have {', '.join(own_tasks())}, or module:Class)"
        )


def _check_file_names(path: Path, suite: SuiteFile) -> None:
    """Names that become folders and files are safe there."""
    methods = {method for section in suite.sections.values() for method in section.methods}
    variants = {label for section in suite.sections.values() for label in section.variants}
    sources = {data.source for data in suite.data.values() if data.source}
    keys = [*suite.models, *suite.data, *suite.sections, *suite.contrasts]
    for item in [*keys, *methods, *variants, *sources]:
        if not _SAFE_NAME.fullmatch(item):
            raise ReproduceError(
                f"{path}: {item!r} cannot be a name: letters, digits and _ . : - only, as it "
                "becomes the name of a folder"
            )


def _check_extends(path: Path, suite: SuiteFile) -> None:
    for name in suite.models:
        seen = [name]
        while (parent := suite.models[seen[-1]].extends) is not None:
            if parent not in suite.models:
                raise ReproduceError(
                    f"{path}: model {seen[-1]} extends {parent!r}, which does not exist"
                )
            if parent in seen:
                raise ReproduceError(f"{path}: model {name} extends itself ({' -> '.join(seen)})")
            seen.append(parent)
        _check_continues(path, suite, name)


def _check_continues(path: Path, suite: SuiteFile, name: str) -> None:
    """The runs that a model begins from are in the suite and begin from no other."""
    if (base := suite.models[name].continues) is None:
        return
    model, _, method = base.partition(".")
    trained = any(
        model in section.models and method in section.methods for section in suite.sections.values()
    )
    if not trained or suite.models[model].continues:
        raise ReproduceError(
            f"{path}: model {name} continues {base!r:.80}: give MODEL.METHOD of a section, which "
            "continues nothing itself"
        )


_NOT_IN_SUITES = frozenset(
    {"eval_include_path", "eval_tasks", "save", "load", "log_dir", "tensorboard_dir",
     "data_cache_dir", "eval_results_prefix", "sample_input_file", "sample_output_file",
     "wandb_host", "deepspeed_extra_args"}
)  # fmt: skip
"""Beside the launcher's keys: programs, and places to read from or write to."""
_PREPARE_FLAGS = frozenset(
    {"--input", "--jsonl-key", "--split-text", "--ftfy", "--strict", "--workers"}
)


def _check_data_only(path: Path, suite: SuiteFile) -> None:
    """A suite is data: it may not name hosts, programs or paths outside the working directory."""
    variants = [item for section in suite.sections.values() for item in section.variants.values()]
    configs = [model.config for model in suite.models.values()]
    configs += [data.config for data in suite.data.values()]
    configs += [variant.config for variant in variants]
    for config in [*configs, *suite.method_config.values()]:
        for key in map(canonical_key, config):
            if OWNER.get(key) == "launcher" or key in _NOT_IN_SUITES:
                raise ReproduceError(
                    f"{path}: {key} = {config.get(key)!r:.80}: a suite may not choose hosts, "
                    f"programs or places; give --set {key}=... or a cluster file"
                )
    for name, data in suite.data.items():
        for word in data.prepare:
            flag, _, value = word.partition("=") if word.startswith("-") else ("", "", word)
            place = Path(value)
            if place.is_absolute() or ".." in place.parts or (flag and flag not in _PREPARE_FLAGS):
                raise ReproduceError(
                    f"{path}: data {name}: prepare: {word!r:.80} is not for a suite: it may give "
                    f"{', '.join(sorted(_PREPARE_FLAGS))} with paths below the working directory; "
                    "prepare other data with prepare_data.py before"
                )
