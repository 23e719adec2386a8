"""The benchmark compares like with like, and its arithmetic is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tools.benchmark import main
from tools.benchmarks.contenders import Inputs, dense_forward, sdpa_dense_bias, tiled
from tools.benchmarks.timing import Target, Timings, interleave, render_table


def test_contenders_with_a_log_bias_compute_the_same() -> None:
    inputs = Inputs(2, 3, 70, 16, train=True)
    expected = tiled(inputs, "kerple_log")()
    for contender in (dense_forward(inputs), sdpa_dense_bias(inputs)):
        torch.testing.assert_close(contender(), expected, rtol=1e-4, atol=1e-5)


def test_training_contender_leaves_no_gradients_behind() -> None:
    inputs = Inputs(1, 2, 40, 16, train=True)
    tiled(inputs, "kerple_power")()
    assert inputs.q.grad is None


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
    assert render_table([["a", "bc"], ["1", "2"]]) == "| a | bc |\n|---|----|\n| 1 | 2  |"


def test_step_runs_every_embedding_on_shared_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    result = tmp_path / "step.json"
    threads = torch.get_num_threads()
    options = ["--layers", "1", "--hidden", "32", "--heads", "2", "--vocabulary", "128"]
    options += ["--length", "32", "--repeats", "2", "--threads", str(threads)]
    main(["step", *options, "--json", str(result)])
    content = json.loads(result.read_text())
    assert set(content["seconds"]) == {"kerple_log", "kerple_power", "alibi", "rpe", "none"}
    assert all(len(rounds) == 2 for rounds in content["seconds"].values())
    assert content["spread"] >= 1.0
    assert "GPU: not measured" in capsys.readouterr().out


def test_unknown_benchmark_lists_what_there_is(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["nothing"])
    assert "attention" in capsys.readouterr().err
