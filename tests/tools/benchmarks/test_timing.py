"""Contenders take turns, and the arithmetic of their rounds is right."""

from __future__ import annotations

from tools.benchmarks.timing import Target, Timings, interleave, render_table


def test_ratios_are_taken_within_rounds() -> None:
    timings = Timings({"a": [1.0, 10.0, 2.0], "b": [2.0, 20.0, 4.0], "once": [3.0]})
    assert timings.ratio("a", "b") == 0.5
    assert timings.ratio("once", "a") == 3.0
    assert timings.median("a") == 2.0
    assert timings.best("a") == 1.0


def test_contenders_take_turns_in_both_directions_after_a_warm_up() -> None:
    order: list[str] = []
    contenders = {name: lambda name=name: order.append(name) for name in "abc"}
    interleave(contenders, 2)
    assert "".join(order) == "abc" + "cba" + "abc"


def test_a_slow_contender_sits_out_the_later_rounds() -> None:
    order: list[str] = []
    contenders = {name: lambda name=name: order.append(name) for name in "ab"}
    timings = interleave(contenders, 3, slow={"b": 1})
    assert "".join(order) == "a" + "ba" + "a" + "a"
    assert {name: len(rounds) for name, rounds in timings.rounds.items()} == {"a": 3, "b": 1}


def test_target_and_table_text() -> None:
    assert "ok" in str(Target("x", 1.0, 1.1))
    assert "MISSED" in str(Target("x", 1.2, 1.1))
    head, line, row = render_table([["a", "bc"], ["1.50", "2"]]).splitlines()
    assert [cell.strip() for cell in head.split("|")] == ["", "a", "bc", ""]
    assert [cell.strip() for cell in row.split("|")] == ["", "1.50", "2", ""]
    assert set(line) == {"|", "-"} and line.count("|") == 3
