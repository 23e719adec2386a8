"""Tasks are found by name, by class, or not at all, without importing what is slow."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron.errors import EvaluationError
from megatron.evaluation.task_registry import find_task, imported_task, own_tasks
from megatron.evaluation.tasks import GroupView
from tests.conftest import REPOSITORY

RESULTS = {
    "recall": {"grid": [{"kind": "mqar", "length": 8, "accuracy": 0.5}]},
    "recall_attention": {
        "grid": [
            {
                "kind": "mqar",
                "length": 8,
                "heads": [{"layer": 0, "head": 0, "answer": 0.5, "far": 0.1}],
            }
        ]
    },
    "induction": {
        "grid": [{"length": 8, "loss": 1.0, "by_distance": [{"distance": 4, "loss": 1.0}]}]
    },
}


def test_every_file_of_the_package_registers_its_tasks() -> None:
    for name in ("extrapolation", "positionwise", "passkey", "recall", "ruler", "induction"):
        assert own_tasks()[name].name == name
        assert find_task(name) is own_tasks()[name]


def test_a_report_knows_the_tasks_without_deepspeed_or_lm_eval() -> None:
    code = (
        "import sys; from megatron.evaluation.task_registry import own_tasks; own_tasks(); "
        "print([m for m in ('deepspeed', 'lm_eval') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_what_is_no_task_is_refused() -> None:
    with pytest.raises(EvaluationError, match="derive the class from EvaluationTask"):
        imported_task("pathlib:Path")
    with pytest.raises(EvaluationError, match="cannot be imported"):
        imported_task("no_such_module:Task")


def test_cells_belong_to_groups_that_a_view_shows() -> None:
    shown = {name for name, task in own_tasks().items() for v in task.views if type(v) is GroupView}
    assert set(RESULTS) <= shown
    for name, results in RESULTS.items():
        views = [view for view in own_tasks()[name].views if isinstance(view, GroupView)]
        groups = {group for view in views for group in view.groups}
        assert {group for group, _ in own_tasks()[name].cells(results)} <= groups
