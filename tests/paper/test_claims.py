"""The paper's claims, judged from the numbers; its theory, on trained and on steeper kernels."""

from __future__ import annotations

import pytest

from megatron.paper.claims import Verdict, check_claims, cpd_table
from megatron.paper.report import collect_results
from megatron.paper.run_results import ResultSet, RunResults
from megatron.paper.suite import Run, Suite, load_suite
from megatron.paper.suite_file import PERPLEXITY, POSITIONWISE, DataSet
from tests.paper.synthetic import write_run


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


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """The main table on one data set without sinusoidal."""
    made = load_suite("laptop", ["stdlib", "main"], runs_root=tmp_path_factory.mktemp("runs"))
    for run in made.runs:
        if run.method != "sinusoidal":
            write_run(run)
    return made


def test_claims_are_judged_from_the_numbers(suite: Suite) -> None:
    results = collect_results(suite)
    findings = check_claims(results, "valid", (DataSet(name="stdlib", title="stdlib"),))
    verdicts = {finding.claim: finding.verdict for finding in findings}
    assert verdicts["KERPLE-log is below ALiBi at every length"] is Verdict.AGREES
    assert verdicts["T5 bias is best at the training length"] is Verdict.AGREES
    rotary = next(claim for claim in verdicts if claim.startswith("Rotary explodes"))
    assert verdicts[rotary] is Verdict.AGREES
    sinusoidal = next(claim for claim in verdicts if claim.startswith("Sinusoidal explodes"))
    assert verdicts[sinusoidal] is Verdict.NOT_MEASURED
    assert not [claim for claim in verdicts if "Gaussian" in claim], "the suite has none"


def test_position_wise_claims_compare_with_the_window(suite: Suite) -> None:
    results = collect_results(suite)
    stdlib = (DataSet(name="stdlib", title="stdlib"),)
    name = "KERPLE-log uses what lies beyond the training length: below its own window"

    def verdict() -> tuple[Verdict, str]:
        findings = check_claims(results, "valid", stdlib)
        return next((f.verdict, f.evidence) for f in findings if f.claim == name)

    assert verdict()[0] is Verdict.AGREES and "-" in verdict()[1]
    for run in results.runs:
        for (_, length), entry in run.of(POSITIONWISE).items():
            entry.by_position = (9.0,) * length
    assert verdict()[0] is Verdict.DISAGREES and "+" in verdict()[1]


def test_contrary_results_are_reported_as_contrary(suite: Suite) -> None:
    results = collect_results(suite)
    for run in results.runs:
        if run.run.method == "alibi":
            halved = {place: value * 0.5 for place, value in run.of(PERPLEXITY).items()}
            run.of(PERPLEXITY).update(halved)
    findings = check_claims(results, "valid", (DataSet(name="stdlib", title="stdlib"),))
    first = next(
        item for item in findings if item.claim == "KERPLE-log is below ALiBi at every length"
    )
    assert first.verdict is Verdict.DISAGREES
    assert "0 of 6" in first.evidence


def test_one_seed_that_is_behind_everywhere_disagrees(suite: Suite) -> None:
    """A test needs two seeds; without one, six of six lengths still count."""
    results = collect_results(suite)
    first = min(run.run.seed for run in results.runs)
    results = ResultSet(tuple(run for run in results.runs if run.run.seed == first))
    for run in results.runs:
        if run.run.method == "kerple_log":
            doubled = {place: value * 2.0 for place, value in run.of(PERPLEXITY).items()}
            run.of(PERPLEXITY).update(doubled)
    findings = check_claims(results, "valid", (DataSet(name="stdlib", title="stdlib"),))
    claim = next(f for f in findings if f.claim == "KERPLE-log is at least as good as KERPLE-power")
    assert claim.verdict is Verdict.DISAGREES
    assert claim.evidence == "above power's at 6 of 6 lengths, one seed, untested"
