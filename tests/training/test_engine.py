"""A step whose gradient is not finite is refused whole, under every layout; fp16's loss scale."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.training.cases import ADAM, ON_TWO, layout, precision, run_cases, tiny_config, write_data

ONE = {
    "fp32": layout(),
    "fp32_zero2": layout(zero=2),
    "bf16": {**layout(), **precision("bf16")},
    "bf16_zero1": {**layout(zero=1), **precision("bf16")},
    "bf16_pp1": {**layout(pp=1), **precision("bf16")},
    "no_clipping": {**layout(), "gradient_clipping": 0.0},
}
TWO = {
    **ON_TWO,
    "bf16_mp2": {**layout(mp=2), **precision("bf16")},
    "bf16_pp2": {**layout(pp=2), **precision("bf16")},
    "bf16_dp2_zero2": {**layout(zero=2), **precision("bf16")},
}
TABLE = [(name, 1) for name in ONE] + [(name, 2) for name in TWO]
FP16 = {
    "fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 50},
    "optimizer": ADAM,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("numbers")
    data = write_data(directory)
    cases: dict[int, dict[str, Any]] = {1: {}, 2: {}}
    for name, processes in TABLE:
        config = tiny_config(data, **{"optimizer": ADAM, **{**ONE, **TWO}[name]})
        cases[processes][name] = {"config": config, "steps": 3, "poison": [1]}
    for zero in (0, 1):
        config = tiny_config(data, train_iters=40, **FP16, **layout(zero=zero))
        cases[1][f"fp16_zero{zero}"] = {"config": config, "steps": 30}
    return run_cases(cases[1], directory, 1) | run_cases(cases[2], directory, 2)


@pytest.mark.parametrize(("name", "processes"), TABLE)
def test_an_infinite_gradient_on_one_rank_refuses_the_step_on_all(
    results: dict[str, Any], name: str, processes: int
) -> None:
    result = results[name]
    assert result["skipped"] == [[False] * processes, [True] * processes, [False] * processes]
    assert result["unchanged"] == [[False] * processes, [True] * processes, [False] * processes]
    assert not math.isfinite(result["grad_norms"][1])
    assert all(math.isfinite(loss) for loss in result["losses"])


@pytest.mark.parametrize("zero", [0, 1])
def test_fp16_finds_its_loss_scale_and_learns(results: dict[str, Any], zero: int) -> None:
    result = results[f"fp16_zero{zero}"]
    skipped = [any(ranks) for ranks in result["skipped"]]
    assert skipped[0] and not skipped[-1]
    assert result["loss_scale"] == 2.0**24 / 2 ** sum(skipped)
    assert result["losses"][-1] < result["losses"][0] - 0.1
    assert result["grad_norms"][-1] < 10, "the norm is that of the unscaled gradient"
