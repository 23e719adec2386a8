"""Every view of a task of ours can be drawn: its groups are groups of its cells."""

from __future__ import annotations

from megatron.evaluation.report_views import GroupView
from megatron.evaluation.task_registry import own_tasks

RESULTS = {
    "recall": {"grid": [{"kind": "mqar", "length": 8, "accuracy": 0.5}]},
    "induction": {
        "grid": [{"length": 8, "loss": 1.0, "by_distance": [{"distance": 4, "loss": 1.0}]}]
    },
}


def test_cells_belong_to_groups_that_a_view_shows() -> None:
    shown = {name for name, task in own_tasks().items() for v in task.views if type(v) is GroupView}
    assert set(RESULTS) <= shown
    for name, results in RESULTS.items():
        views = [view for view in own_tasks()[name].views if isinstance(view, GroupView)]
        groups = {group for view in views for group in view.groups}
        assert {group for group, _ in own_tasks()[name].cells(results)} <= groups
