"""What the parts of a suite say of each other: a name, length or setting that would have no effect.

A misspelt one is refused before anything starts, not found missing in the report days later.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron.errors import ConfigError, ReproduceError, did_you_mean
from megatron.neox_arguments import NeoXArgs, of_the_checkpoint
from megatron.paper.cells import published_cells
from megatron.paper.suite_file import PERPLEXITY, Contrast, Section, SuiteFile

if TYPE_CHECKING:
    from megatron.paper.suite import Run

_FROM_THE_SECTION = ("key", "methods", "data", "points")
"""Fields of a table that are not in the file."""


def check_references(where: str, suite: SuiteFile) -> None:
    """ReproduceError with the place of the first mistake; `where` is the file."""
    methods = {name for section in suite.sections.values() for name in section.methods}
    _known(f"{where}: method_config", suite.method_config, methods)
    _known(
        f"{where}: data: published",
        filter(None, [data.published for data in suite.data.values()]),
        {data for _, data, *_ in published_cells()},
    )
    for name, section in suite.sections.items():
        _check_section(f"{where}: section {name}", section)
    kinds = _kinds(suite)
    for name, contrast in suite.contrasts.items():
        _check_contrast(f"{where}: contrasts: {name}", contrast, kinds, suite)
    _not_empty(where, {"sections": suite.sections, "seeds": suite.seeds})


def _check_section(where: str, section: Section) -> None:
    _not_empty(
        where,
        {key: getattr(section, key) for key in ("models", "methods", "data", "tasks")}
        | ({} if section.seeds is None else {"seeds": section.seeds}),
    )
    if isinstance(section.lengths, dict):
        _known(f"{where}: lengths", section.lengths, section.models)
    if (table := section.table) is None:
        return
    if given := [key for key in _FROM_THE_SECTION if key in table.model_fields_set]:
        raise ReproduceError(f"{where}: table: {given[0]} follows from the section; leave it out")
    if PERPLEXITY not in section.tasks:
        raise ReproduceError(
            f"{where}: its table shows {PERPLEXITY}, which is not among its tasks "
            f"({', '.join(section.tasks)}); other tasks have tables of their own: leave out table"
        )
    measured = {length for model in section.models for length in section.lengths_of(model)}
    printed = {length for key, _, _, length, _ in published_cells() if key == table.published}
    _known(f"{where}: table: lengths", table.lengths or (), measured | printed)
    _known(f"{where}: table: integer_methods", table.integer_methods, section.methods)
    published = {key for key, *_ in published_cells()}
    _known(f"{where}: table: published", filter(None, [table.published]), published)


def _check_contrast(where: str, contrast: Contrast, kinds: set[str], suite: SuiteFile) -> None:
    for pair in contrast.pairs:
        _known(f"{where}: {pair.label}", (pair.first, pair.second), kinds)
    for key in ("growth", "beyond"):
        for label, kind in getattr(contrast, key).items():
            _known(f"{where}: {key}: {label}", [kind], kinds)
    tasks = {name for section in suite.sections.values() for name in section.tasks}
    _known(f"{where}: curve_task", filter(None, [contrast.curve_task]), tasks)
    lengths = {
        length
        for section in suite.sections.values()
        for model in section.models
        for length in section.lengths_of(model)
    }
    _known(f"{where}: curve_lengths", contrast.curve_lengths, lengths)


def _kinds(suite: SuiteFile) -> set[str]:
    """MODEL.DATA.METHOD of all runs, and those with the variants of their sections."""

    def of(section: Section) -> Iterator[str]:
        for model in section.models:
            for data in section.data:
                yield from (f"{model}.{data}.{method}" for method in section.methods)
                for label, variant in section.variants.items():
                    yield from (f"{model}.{data}.{name}@{label}" for name in variant.methods)

    return {kind for section in suite.sections.values() for kind in of(section)}


def _known(where: str, named: Iterable[Any], known: Iterable[Any]) -> None:
    have = list(dict.fromkeys(known))
    for name in named:
        if name in have:
            continue
        shown = ", ".join(map(str, sorted(have))) or "none"
        listed = f"have {shown:.400}"
        hint = did_you_mean(str(name), list(map(str, have)), listed)
        raise ReproduceError(f"{where}: {name!r:.80} is unknown: {hint}")


def _not_empty(where: str, parts: Mapping[str, Any]) -> None:
    for key, part in parts.items():
        if not part:
            raise ReproduceError(f"{where}: {key} is empty: nothing would be run; give one or more")


def check_run(where: str, run: Run, names: Container[str]) -> None:
    """ReproduceError unless its model begins from one of the runs `names` and can be evaluated."""
    if run.base is not None and run.base.name not in names:
        raise ReproduceError(
            f"{where}: it begins from {run.base.name}, which no section trains: give a section of "
            "that model these data and seeds"
        )
    args = _parsed(where, run.config)
    for split in run.splits:
        if getattr(args.evaluation, f"do_{split}") is False:
            raise ReproduceError(
                f"{where}: do_{split} = false, and splits has {split}: nothing would be measured; "
                "change one of them"
            )
    for step in run.evaluations:
        if step.settings:
            _check_variant(f"{where}: variant {step.variant}", run, args, dict(step.settings))


def _parsed(where: str, config: Mapping[str, Any]) -> NeoXArgs:
    try:
        return NeoXArgs.from_dict(dict(config))
    except ConfigError as error:
        raise ReproduceError(f"{where}: {error}") from error


def _check_variant(where: str, run: Run, args: NeoXArgs, settings: Mapping[str, Any]) -> None:
    """A variant evaluates the trained model, of which it may change little."""
    from megatron.checkpoints.saved_config import differences  # imports torch

    now = _parsed(where, {**run.config, **settings}).to_dict()
    for key, (trained, value) in differences(args.to_dict(), now, of_the_checkpoint).items():
        raise ReproduceError(
            f"{where}: {key} = {value!r:.80}, and the model is trained with {trained!r:.80}, "
            "which an evaluation cannot change; give it a model of its own"
        )
