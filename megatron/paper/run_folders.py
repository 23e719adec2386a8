"""Trained runs as a suite: folders that train.py wrote, compared by the code of suites' reports.

Runs whose training differs in the seed alone are one kind; kinds are compared seed by seed. The
lengths and the other evaluation settings are the first run's, for all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.atomic_files import fingerprint, read_json
from megatron.errors import ReproduceError
from megatron.evaluation.tasks import LENGTH_FACTORS
from megatron.neox_arguments import OWNER, NeoXArgs
from megatron.neox_arguments.catalogue import label_of
from megatron.neox_arguments.command_line import saved_configs
from megatron.neox_arguments.yaml_files import parse_yaml, read_text
from megatron.paper.result_fit import Fit, ResultFiles
from megatron.paper.suite import Run, Step, Suite, parsed_sets, trained_with
from megatron.paper.suite_file import (
    PERPLEXITY,
    Contrast,
    DataSet,
    Layout,
    Model,
    Pair,
    Point,
    Rounding,
    Section,
    SuiteFile,
    TableSpec,
)
from megatron.training.metrics import finished_at

_MODEL, _SECTION = "run", "main"
_STEP = Step(PERPLEXITY)


def suite_of_folders(place: Path, folders: Sequence[Path], sets: Sequence[str] = ()) -> Suite:
    """`sets` are evaluation keys for all of them; the report goes into `place`."""
    paths = list(dict.fromkeys(folders))
    if len(paths) < 2:
        raise ReproduceError(f"{paths[0]}: give the folders of two trained runs or more")
    configs = _evaluated_alike({path: saved_training(path) for path in paths}, sets)
    kinds: dict[str, list[Run]] = {}
    for path, config in configs.items():
        args = NeoXArgs.from_dict(config)
        seed = args.runtime.seed
        own = {
            key: v for key, v in trained_with(config).items() if key not in ("seed", "data_seed")
        }
        run = Run("", _MODEL, "", args.model.method, seed, 1, config, path, (_SECTION,), (_STEP,))
        same = kinds.setdefault(fingerprint(own), [])
        if twin := next((other for other in same if other.seed == seed), None):
            raise ReproduceError(
                f"{twin.directory} and {path}: the same training with the same seed ({seed})"
            )
        same.append(run)
    return _suite(place, [_named(runs, list(kinds.values())) for runs in kinds.values()])


def saved_training(folder: Path) -> dict[str, Any]:
    """The config of a finished run; in a suite's folder the suite's, whose hash is recorded."""
    files, _ = saved_configs(folder, None)
    of_suite = folder / "config.yml"
    if read_json(folder / "run.json") and of_suite.is_file():
        config = dict(parse_yaml(read_text(of_suite), str(of_suite)))
    else:
        config = NeoXArgs.from_files(files).to_dict()
    step, last = finished_at(folder), config.get("train_iters")
    if step is None or (last is not None and step != last):
        raise ReproduceError(
            f"{folder}: its training has not finished{f' (of {last} steps)' if last else ''}; "
            "start it again with the same command, then compare"
        )
    return config | {"train_iters": step}


def _evaluated_alike(
    configs: Mapping[Path, dict[str, Any]], sets: Sequence[str]
) -> dict[Path, dict[str, Any]]:
    """All configs with the first one's evaluation keys, and `sets` above them."""
    first = next(iter(configs.values()))
    common = {key: value for key, value in first.items() if OWNER.get(key) == "evaluation"}
    for key, value in parsed_sets(sets).items():
        if OWNER.get(key) != "evaluation":
            raise ReproduceError(
                f"--set {key}={value!s:.80}: of trained runs, evaluation keys only"
            )
        common[key] = value
    shortest = min(int(config["seq_length"]) for config in configs.values())
    common.setdefault("eval_lengths", [shortest * factor for factor in LENGTH_FACTORS])
    for key in ("eval_tasks", "eval_results_prefix"):
        common.pop(key, None)
    return {
        path: {k: v for k, v in config.items() if OWNER.get(k) != "evaluation"} | common
        for path, config in configs.items()
    }


def _named(runs: Sequence[Run], kinds: Sequence[Sequence[Run]]) -> list[Run]:
    """A kind with its place in tables: its text and method, or its folder where these repeat."""
    places = [_place(kind[0]) for kind in kinds]
    lengths = {kind[0].train_length for kind in kinds}
    text, method = _place(runs[0])
    alone = places.count((text, method)) == 1 and len(lengths) == 1
    data = re.sub(r"[^\w-]", "_", text if alone else runs[0].directory.resolve().name)
    return [replace(run, data=data, name=f"{_MODEL}.{data}.{method}.{run.seed}") for run in runs]


def _place(run: Run) -> tuple[str, str]:
    path = run.config.get("data_path") or (run.config.get("train_data_paths") or ["data"])[0]
    return Path(str(path)).name.removesuffix("_text_document"), run.method


def _suite(place: Path, kinds: Sequence[Sequence[Run]]) -> Suite:
    runs = tuple(run for kind in kinds for run in kind)
    names = list(dict.fromkeys(run.data for run in runs))
    data = {name: DataSet(name=name, title=name) for name in names}
    methods = list(dict.fromkeys(run.method for run in runs))
    lengths = sorted({int(length) for length in runs[0].config["eval_lengths"]})
    trained_at = {run.train_length for run in runs}
    train_length = 0 if len(trained_at) > 1 else trained_at.pop()  # 0: each folder's own
    table = TableSpec(
        layout=Layout.STACKED if len(names) == 1 else Layout.SIDE_BY_SIDE,
        caption="Perplexity on the validation part.",
        rounding=Rounding.MAGNITUDE,
        mark_best=len(names) == 1,
        mark_significance=len(runs) > len(kinds),
        key=_SECTION,
        methods=tuple(methods),
        data=tuple(data.values()),
        points=tuple(Point(train_length=train_length, length=length) for length in lengths),
        only_measured=True,
    )
    section = Section(
        name=_SECTION, title="Perplexity by length", models=[_MODEL], methods=methods,
        data=names, lengths=lengths, table=table,
    )  # fmt: skip
    file = SuiteFile(
        about=f"Trained runs side by side: {', '.join(str(run.directory) for run in runs)}",
        seeds=sorted({run.seed for run in runs}),
        models={_MODEL: Model(config={})},
        data=data,
        sections={_SECTION: section},
        contrasts=_contrasts(kinds),
    )
    return Suite(place.name, file, (section,), runs, place.parent, Path())


def _contrasts(kinds: Sequence[Sequence[Run]]) -> dict[str, Contrast]:
    """Each kind against the first, if it read the same text."""
    first, *others = kinds
    by_method = len({kind[0].method for kind in kinds}) == len(kinds)

    def label(kind: Sequence[Run]) -> str:
        return label_of(kind[0].method) if by_method else kind[0].directory.resolve().name

    pairs = [
        Pair(label=f"{label(kind)} against {label(first)}", first=_kind(kind), second=_kind(first))
        for kind in others
        if _place(kind[0])[0] == _place(first[0])[0]
    ]
    title = "Differences, seed by seed"
    return {"differences": Contrast(title=title, pairs=pairs)} if pairs else {}


def _kind(runs: Sequence[Run]) -> str:
    return runs[0].name.rpartition(".")[0]


def missing_evaluation(run: Run) -> NeoXArgs | None:
    """What evaluate.py has to do so that the run can be compared; None if its results are there."""
    if ResultFiles(run).check(_STEP).fit is Fit.COMPLETE:
        return None
    folder = run.directory
    place = {"load": str(folder), "save": str(folder), "eval_tasks": [PERPLEXITY]}
    prefix = str(folder / "results" / "compare")
    return NeoXArgs.from_dict({**run.config, **place, "eval_results_prefix": prefix})
