"""evaluate.py from the command line: a task of one's own, one bar, missing packages, Ctrl-C."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.commands import run
from megatron.evaluation import lm_eval_cli
from megatron.evaluation.losses import TotalBar
from tests.evaluation.helpers import tiny_config, write_checkpoint, write_data

OWN_TASK = '''
from megatron.evaluation.tasks import EvaluationTask


class CountParameters(EvaluationTask):
    """Not a measurement anybody needs."""

    def parameters(self, options):
        return {}

    def run(self, context):
        return {"parameters": context.cells.get("all", context.model.num_parameters)}

    def table(self, results):
        return f"{results['parameters']} parameters"


class Unfinished(EvaluationTask):
    pass
'''


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments that evaluate a tiny run; `load: auto` means its `save`."""
    config = tiny_config(
        data_path=str(write_data(tmp_path / "toy_text_document")),
        save=str(tmp_path / "run"),
        load="auto",
        eval_lengths=[8, 16],
    )
    write_checkpoint(tmp_path / "run", config)
    (tmp_path / "config.yml").write_text(yaml.safe_dump(config), "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # this folder will be added
    return [str(tmp_path / "config.yml")]


@pytest.mark.parametrize("given", ["run", "run/global_step10", "moved"])
def test_a_folder_is_enough(
    command: list[str], tmp_path: Path, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run, one checkpoint of it, a run that was moved: the saved config, and --set on top."""
    run_folder = tmp_path / "run"
    if given == "moved":
        run_folder = run_folder.rename(tmp_path / "moved")
    assert run("evaluate", [given, "--eval_lengths", "8"]) == 0
    (file,) = run_folder.glob("results/*.json")
    measured = json.loads(file.read_text("utf-8"))
    assert measured["iteration"] == 10
    assert [entry["length"] for entry in measured["results"]["valid"]] == [8]
    (hint,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("next: "))
    words = hint.split()
    assert run("generate", [words[-1], "--set", "maximum_tokens=3", "-o", "out.jsonl"]) == 0
    assert json.loads((tmp_path / "out.jsonl").read_text("utf-8"))["length"] <= 3
    (tmp_path / "more.yml").write_text("maximum_tokens: 2\n", "utf-8")
    assert run("generate", [given, "--override", "more.yml", "-o", "out.jsonl"]) == 0
    assert json.loads((tmp_path / "out.jsonl").read_text("utf-8"))["length"] <= 2


def test_folders_that_are_not_enough(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for name, words, fragment in (
        ("generate", ["empty"], "empty: a folder without a saved config"),
        ("generate", ["run", "--iteration", "7"], "run has no such step; there are "),
        ("train", ["run"], "train.py takes YAML files, for instance run/global_step10/configs/"),
    ):
        with pytest.raises(SystemExit) as ended:
            run(name, words)
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert fragment in line


def test_tasks_are_listed_without_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("evaluate", ["--eval_tasks", "list"]) == 0
    listed = capsys.readouterr().out
    assert "extrapolation     Loss and perplexity at each length" in listed and "ruler" in listed


def test_a_typo_in_a_task_is_told_without_lm_eval(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*_: object) -> list[str]:
        raise AssertionError("lm-eval would be imported")

    monkeypatch.setattr("megatron.evaluation.task_registry.lm_eval_task_names", slow)
    assert run("evaluate", [*command, "--eval_tasks", "passkye"]) == 1
    assert "error: passkye: unknown task; nearest: passkey" in capsys.readouterr().err


def test_a_task_of_ones_own(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_task.py").write_text(OWN_TASK, "utf-8")
    assert run("evaluate", [*command, "--eval_tasks", "own_task:CountParameters"]) == 0
    (file,) = (tmp_path / "run" / "results").glob("*CountParameters*.json")
    count = json.loads(file.read_text("utf-8"))["results"]["parameters"]
    assert f"{count} parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("nowhere:Task", "No module named 'nowhere'"),
        ("json:Task", "no attribute 'Task'"),
        ("json:JSONDecoder", "derive the class from EvaluationTask"),
        ("own_task:Unfinished", "abstract method"),
    ],
)
def test_a_wrong_task_of_ones_own_is_one_line(
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    fragment: str,
) -> None:
    (tmp_path / "own_task.py").write_text(OWN_TASK, "utf-8")
    assert run("evaluate", [*command, "--eval_tasks", name]) == 1
    lines = capsys.readouterr().err.splitlines()
    (line,) = (line for line in lines if line.startswith("error: "))
    assert line.startswith(f"error: {name}: ") and fragment in line


def test_an_lm_eval_task_without_lm_eval_names_its_pip_command(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm_eval_cli, "find_spec", lambda name: None)
    monkeypatch.setattr("megatron.evaluation.task_registry.find_spec", lambda name: None)
    assert run("evaluate", [*command, "--eval_tasks", "lambada_openai"]) == 1
    assert "pip install -r requirements/requirements-eval.txt" in capsys.readouterr().err


def test_ctrl_c_is_one_word_and_the_rest_is_done_later(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.evaluation import perplexity

    measure, calls = perplexity.sequence_losses, []

    def interrupted_after_one(context: Any, texts: Any, label: str) -> Any:
        calls.append(label)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(context, texts, label)

    monkeypatch.setattr(perplexity, "sequence_losses", interrupted_after_one)
    assert run("evaluate", command) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"
    assert run("evaluate", command) == 0
    assert calls[2] == calls[1], "what was measured is not measured again"
    assert "continues an interrupted evaluation (1 parts done)" in capsys.readouterr().out


def test_one_bar_for_all_tasks_counts_to_its_end(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    move, totals = TotalBar.move_to, []

    def watch(self: TotalBar, done: float) -> None:
        move(self, done)
        seen.append(self.done)
        totals.append(self.total)

    monkeypatch.setattr(TotalBar, "move_to", watch)
    tasks = ["--eval_tasks", "extrapolation", "positionwise", "sliding"]
    assert run("evaluate", [*command, *tasks]) == 0
    assert len(set(totals)) == 1 and seen == sorted(seen)
    assert seen[-1] == pytest.approx(totals[0])
    assert len({round(done) for done in seen}) > 6, "it moves within tasks"
