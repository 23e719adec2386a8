"""Results of the laptop suite's main table with made-up numbers, read once."""

from __future__ import annotations

import pytest

from megatron.paper.report import collect_results
from megatron.paper.run_results import ResultSet
from megatron.paper.suite import load_suite
from tests.paper.synthetic import write_run


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> ResultSet:
    root = tmp_path_factory.mktemp("runs")
    suite = load_suite("laptop", ["main", "stdlib"], runs_root=root)
    for run in suite.runs:
        write_run(run)
    return collect_results(suite)
