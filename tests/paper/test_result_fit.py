"""A table never mixes settings: what does not fit is named, left out, and evaluated again."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.evaluation.task_registry import find_task
from megatron.evaluation.tasks import EvaluationOptions, requested
from megatron.neox_arguments import NeoXArgs
from megatron.paper.report import make_report
from megatron.paper.result_fit import Fit, check_steps, done_steps
from megatron.paper.run_results import read_run
from megatron.paper.status import status_text
from megatron.paper.suite import Run, Step, Suite, load_suite
from megatron.paper.suite_file import PERPLEXITY
from tests.conftest import REPOSITORY
from tests.paper.synthetic import write_run


@pytest.fixture
def one_run(tmp_path: Path) -> tuple[Suite, Run, Path]:
    suite = load_suite("laptop", ["main", "stdlib", "alibi", "*.1235"], runs_root=tmp_path)
    run = suite.runs[0]
    return suite, run, write_run(run)


def change(directory: Path, settings: dict[str, Any] | None = None, **fields: Any) -> Path:
    """Rewrite the extrapolation result as another evaluation would have left it."""
    path = directory / "results" / "step500_extrapolation.json"
    content = json.loads(path.read_text())
    content |= fields
    if settings is not None:
        content["settings"] |= settings
    path.write_text(json.dumps(content))
    return path


def fit(directory: Path, run: Run) -> tuple[Fit, str]:
    check = check_steps(run)["extrapolation"]
    return check.fit, check.detail


def test_the_suites_own_results_fit(one_run: tuple[Suite, Run, Path]) -> None:
    run = one_run[1]
    assert {check.fit for check in check_steps(run).values()} == {Fit.COMPLETE}
    assert "extrapolation" in done_steps(run)


@pytest.mark.parametrize(
    ("settings", "fields", "message"),
    [
        ({"num_sequences": 2}, {}, "num_sequences 2 instead of 8"),
        ({"lengths": [128, 256]}, {}, "longest length 256 instead of 4096"),
        ({}, {"window": 128, "task": "extrapolation"}, "no result"),
        ({}, {"protocol": "fixed_sequences"}, "protocol fixed_sequences instead of fixed_tokens"),
        ({}, {"seed": 7}, "seed 7 instead of 1235"),
        ({}, {"data_seed": 7}, "data_seed 7 instead of 1235"),
        ({}, {"pos_emb": "rotary"}, "pos_emb rotary instead of alibi"),
        ({"model": {"kerple_legacy_bf16": True}}, {}, "model settings"),
        (
            {"data": [{"split": "valid", "prefix": "d/other_text_document", "share": "90,5,5"}]},
            {},
            "data other_text_document instead of stdlib_text_document",
        ),
    ],
)
def test_other_settings_are_foreign(
    one_run: tuple[Suite, Run, Path], settings: dict[str, Any], fields: Any, message: str
) -> None:
    _, run, directory = one_run
    change(directory, settings, **fields)
    verdict, detail = fit(directory, run)
    assert message in detail
    assert verdict is (Fit.MISSING if message == "no result" else Fit.FOREIGN)
    assert "extrapolation" not in done_steps(run)
    assert not read_run(run).of(PERPLEXITY)


def test_a_report_leaves_out_what_is_foreign_and_says_so(one_run: tuple[Suite, Run, Path]) -> None:
    suite, _, directory = one_run
    change(directory, {"num_sequences": 2})
    files = make_report(suite)
    table = next(item for item in files.tables if item.key == "main")
    assert not any(entry.cell.present for entry in table.entries), "a foreign number in a table"
    message = "foreign: step500_extrapolation.json is num_sequences 2 instead of 8"
    assert message in files.html.read_text(encoding="utf-8")
    assert message in status_text(suite)


def test_another_checkpoint_or_other_data_is_outdated(
    one_run: tuple[Suite, Run, Path], tmp_path: Path
) -> None:
    _, run, directory = one_run
    change(directory, iteration=300)
    assert fit(directory, run) == (
        Fit.OUTDATED,
        "step500_extrapolation.json is of step 300, and the run ends at 500",
    )
    (directory / "global_step500").mkdir()
    sums = {"mp_rank_00_model_states.pt": [1, "00"]}
    (directory / "global_step500" / "checksums.json").write_text(json.dumps(sums))
    change(directory, iteration=500, checkpoint_id="of other weights")
    assert fit(directory, run)[0] is Fit.OUTDATED
    assert "other weights" in fit(directory, run)[1]


def test_a_run_of_another_training_config_is_left_out_whole(tmp_path: Path) -> None:
    old = load_suite("smoke", ["alibi", "*.1235"], runs_root=tmp_path, sets={"train_iters": 20})
    write_run(old.runs[0])
    new = load_suite("smoke", ["alibi", "*.1235"], runs_root=tmp_path, sets={"warmup": 0.5})
    found = read_run(new.runs[0])
    assert not found.of(PERPLEXITY)
    assert not found.losses
    assert "trained with warmup 0.05 instead of 0.5" in found.unused[0]
    assert read_run(old.runs[0]).of(PERPLEXITY)
    assert "was trained with warmup 0.05 instead of 0.5" in status_text(new)


def test_a_key_that_an_older_suite_lacked_can_be_left_out(tmp_path: Path) -> None:
    only = ["alibi", "*.1235"]
    (run,) = load_suite("smoke", only, sets={"lr_decay_rule": None}).runs
    assert "lr_decay_rule" not in run.config


def test_a_length_that_was_tried_and_failed_is_not_tried_for_ever(
    one_run: tuple[Suite, Run, Path],
) -> None:
    _, run, directory = one_run
    path = change(directory)
    content = json.loads(path.read_text())
    for split in ("valid", "test"):
        content["results"][split] = content["results"][split][:-1]
    path.write_text(json.dumps(content))
    assert fit(directory, run) == (Fit.MISSING, "not measured: valid 4096, test 4096")
    errors = [{"split": s, "length": 4096, "error": "too short"} for s in ("valid", "test")]
    change(directory, errors=errors)
    check = check_steps(run)["extrapolation"]
    assert check.fit is Fit.COMPLETE
    assert check.not_measurable == ("valid at 4096: too short", "test at 4096: too short")


def test_a_note_of_a_failure_may_be_anything(one_run: tuple[Suite, Run, Path]) -> None:
    _, run, directory = one_run
    change(directory, errors=[{"split": ["valid"], "length": [4096], "error": "?"}, {}])
    assert fit(directory, run)[0] is Fit.COMPLETE


@pytest.mark.parametrize("results", [{"grid": [{"kind": "mqar"}]}, {"grid": 3}, {}])
def test_a_recall_file_of_another_form_is_no_result(tmp_path: Path, results: object) -> None:
    suite = load_suite("recall", ["alibi"], runs_root=tmp_path)
    (path,) = (write_run(suite.runs[0]) / "results").iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"results": results}))
    assert "recall" not in done_steps(suite.runs[0])
    assert not read_run(suite.runs[0]).of("recall")


def older(directory: Path, sequences: int) -> None:
    """As version 655be44 wrote it: no settings, no identity; 8 sequences at the longest length."""
    path = change(directory, format=1)
    content = json.loads(path.read_text())
    for key in ("settings", "checkpoint_id", "version"):
        content.pop(key, None)
    for entries in content["results"].values():
        for entry in entries:
            entry["sequences"] = sequences * 4096 // entry["length"]
    path.write_text(json.dumps(content))


def test_older_files_count_if_what_they_record_agrees(one_run: tuple[Suite, Run, Path]) -> None:
    suite, run, directory = one_run
    older(directory, sequences=8)
    check = check_steps(run)["extrapolation"]
    assert (check.fit, check.recorded) == (Fit.COMPLETE, False)
    text = make_report(suite).markdown.read_text(encoding="utf-8")
    assert "Results of an older version (1)" in text
    older(directory, sequences=2)
    assert fit(directory, run)[0] is Fit.FOREIGN


def test_a_variant_needs_results_of_its_own(tmp_path: Path) -> None:
    """Plain results, also of an older version that recorded no settings, do not stand in for it."""
    name = "short.python_projects.kerple_log.1235"
    suite = load_suite("study", [name], runs_root=tmp_path)
    run = suite.run_named(name)
    variant = Step("extrapolation", variant="bf16_tables", settings=(("kerple_legacy_bf16", True),))
    assert variant in run.evaluations
    plain = replace(run, evaluations=tuple(step for step in run.evaluations if not step.variant))
    folder = write_run(plain)
    missing = {step.name for step in run.steps} - done_steps(run)
    assert missing == {"extrapolation-bf16_tables"}

    own = folder / "results" / "bf16_tables_extrapolation.json"
    content = json.loads((folder / "results" / "step500_extrapolation.json").read_text())
    old = {key: value for key, value in content.items() if key not in ("settings", "version")}
    own.write_text(json.dumps({**old, "format": 1}))
    assert "extrapolation-bf16_tables" not in done_steps(run)
    content["settings"]["model"] = {"kerple_legacy_bf16": True}
    content["results"]["valid"][0]["ppl"] = 77.0
    own.write_text(json.dumps(content))
    assert done_steps(run) == {step.name for step in run.steps}
    results = read_run(run)
    assert results.of(PERPLEXITY, variant="bf16_tables")["valid", 128] == 77.0
    assert results.of(PERPLEXITY)["valid", 128] != 77.0
    assert not results.unused


def test_a_variant_with_a_nested_key_is_done_once_it_is_measured(tmp_path: Path) -> None:
    """rope_scaling is recorded with all its keys, and the suite names some."""
    suite = load_suite("rope_to_kerple", ["base.stdlib.rotary.1235"], runs_root=tmp_path)
    run = suite.runs[0]
    results = write_run(run) / "results"
    content = json.loads((results / "step1000_extrapolation.json").read_text())
    for step in (step for step in run.evaluations if step.variant):
        model = NeoXArgs.from_dict({**run.config, **step.overrides}).model.model_dump(mode="json")
        content["settings"]["model"] = {"rope_scaling": model["rope_scaling"]}
        assert step.name not in done_steps(run)
        (results / f"{step.variant}_extrapolation.json").write_text(json.dumps(content))
    assert done_steps(run) == {step.name for step in run.steps}


@pytest.mark.parametrize("results", [3, [{"loss": 2.0}], [{"length": "many"}]])
def test_a_result_that_its_task_cannot_read_is_named(
    one_run: tuple[Suite, Run, Path], results: object
) -> None:
    _, run, directory = one_run
    change(directory, results={"valid": results})
    (problem,) = read_run(run).problems
    assert "step500_extrapolation.json: not a result file" in problem and "\n" not in problem
    assert fit(directory, run) == (Fit.MISSING, "no result")


@pytest.mark.parametrize("sets", [{"data_seed": 0}, {"split": None}])
def test_what_is_recorded_by_default_counts(tmp_path: Path, sets: dict[str, Any]) -> None:
    """A data_seed of 0 is not the training's seed, and a split that is not given has a default."""
    suite = load_suite("laptop", ["main", "alibi", "*.1235"], runs_root=tmp_path, sets=sets)
    run = suite.runs[0]
    assert run.config.get("data_seed", 0) == 0
    directory = write_run(run)
    args = NeoXArgs.from_dict(dict(run.config))
    options = EvaluationOptions.from_args(args)
    recorded = requested(find_task(PERPLEXITY), options, args.model.model_dump(mode="json"))
    change(directory, recorded["settings"], data_seed=recorded["data_seed"])
    assert fit(directory, run) == (Fit.COMPLETE, "")


def test_a_pattern_is_named_by_all_its_methods_and_in_older_results_by_one(tmp_path: Path) -> None:
    pattern = [{"pos_emb": "rotary"}, {"pos_emb": "kerple_log"}]
    sets = {"layer_pattern": pattern}
    suite = load_suite("laptop", ["main", "alibi", "*.1235"], runs_root=tmp_path, sets=sets)
    run = suite.runs[0]
    directory = write_run(run)
    for recorded in ("rotary+kerple_log", "alibi"):  # `alibi` is the model's own pos_emb
        change(directory, pos_emb=recorded)
        assert fit(directory, run) == (Fit.COMPLETE, "")
    change(directory, pos_emb="rotary")
    told = "pos_emb rotary instead of rotary+kerple_log"
    assert told in fit(directory, run)[1]


@pytest.mark.slow
def test_an_evaluation_by_hand_never_enters_the_table(tmp_path: Path) -> None:
    """The whole story through the command line: a run, a smaller evaluation by hand, a report."""
    places = ["--runs", str(tmp_path / "runs"), "--data", str(tmp_path / "data")]
    suite = ["--suite", "smoke", "--only", "alibi", "*.1235", *places]

    def call(*command: str) -> str:
        result = subprocess.run(
            [sys.executable, *command],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def rows() -> list[dict[str, str]]:
        path = tmp_path / "runs" / "smoke" / "report" / "tables" / "main.csv"
        with path.open(encoding="utf-8") as file:
            return list(csv.DictReader(file))

    call("tools/reproduce.py", "run", *suite)
    before = rows()
    directory = tmp_path / "runs" / "smoke" / "smoke.stdlib.alibi.1235"
    own = directory / "results" / "step20_extrapolation.json"
    kept = own.read_bytes()
    by_hand = ["--set", "eval_lengths=[32]", "eval_num_sequences=1", "do_test=false"]
    call("deepy.py", "evaluate.py", str(directory / "config.yml"), *by_hand)
    assert own.read_bytes() == kept
    call("tools/reproduce.py", "report", *suite)
    assert rows() == before

    # An older version overwrote the file: the number is left out, said, and measured again.
    (other,) = (directory / "results").glob("step20_extrapolation.*.json")
    shutil.move(other, own)
    out = call("tools/reproduce.py", "report", *suite)
    assert "no results of the suite's settings: main" in out
    assert {row["mean"] for row in rows() if row["table"] == "main"} == {""}
    assert "foreign" in call("tools/reproduce.py", "status", *suite)
    assert "1 to do" in call("tools/reproduce.py", "run", *suite)
    assert rows() == before
