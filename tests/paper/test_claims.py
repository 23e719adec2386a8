"""The report's check of the theory: trained kernels pass, steeper ones would not."""

from __future__ import annotations

import pytest

from megatron.paper.claims import cpd_table
from megatron.paper.run_results import ResultSet, RunResults
from megatron.paper.suite import Run


def trained(method: str, r1: list[float], r2: list[float]) -> RunResults:
    run = Run(f"m.d.{method}.1", "m", "d", method, 1, 1, {"seq_length": 128})
    return RunResults(run, kernel={"r1": r1, "r2": r2})


def test_learned_kernels_are_cpd_and_their_shift_grows_with_the_points() -> None:
    results = ResultSet(
        (
            trained("kerple_log", [1.0, 3.8], [1.0, 0.2]),
            trained("kerple_power", [1.0, 0.2], [1.0, 1.9]),
        )
    )
    table = cpd_table(results, ["kerple_log", "kerple_power", "rotary"], heads=2)
    assert table is not None
    log, power, steep = table.blocks[0].rows
    assert (log.label, power.label) == ("KERPLE-log (2)", "KERPLE-power (2)")
    for row in (log, power):
        assert all(entry.text().startswith("CPD, c ") for entry in row.entries)
        shifts = [entry.cell.mean or 0.0 for entry in row.entries]
        assert shifts == sorted(shifts) and shifts[-1] > 2 * shifts[0] > 0
    assert all(entry.text().startswith("not CPD (1 of 1)") for entry in steep.entries)


def test_a_known_shift() -> None:
    """-d on N points needs (N - 1)/2; the search overshoots by at most a twentieth."""
    table = cpd_table(ResultSet((trained("kerple_power", [1.0], [1.0]),)), ["kerple_power"], 1)
    assert table is not None
    found = [entry.cell.mean for entry in table.blocks[0].rows[0].entries]
    assert found == pytest.approx([1.5, 7.5, 31.5, 63.5], rel=0.06)


def test_without_a_trained_kernel_there_is_no_section() -> None:
    assert cpd_table(ResultSet(()), ["kerple_log"], 4) is None
