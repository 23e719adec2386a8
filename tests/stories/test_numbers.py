"""Numbers that are not finite: steps refused whole, counted, and the run ended in order."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.errors import NonFiniteError
from megatron.training.control_hooks import EXIT_DIVERGED, name_first_bad_layer
from megatron.training.engine import whole_norm
from megatron.training.metrics import Sinks
from megatron.training.progress_hooks import RecordMetrics
from megatron.training.trainer import StepReport
from tests.training.cases import ADAM, ON_TWO, layout, precision, run_cases, tiny_config, write_data
from tests.training.runs import finish, run_config, start_run

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

FULL_DISKS = [("dp2_zero1", False), ("dp2_zero1", True), ("pp2", False)]


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
    for name, background in FULL_DISKS:
        changes = {"optimizer": ADAM, "async_save": background, **TWO[name]}
        cases[2][f"full_disk_{name}_{background}"] = {
            "config": tiny_config(data, **changes),
            "steps": 1,
            "save": str(directory / f"{name}_{background}"),
            "full_disk_on": 1,
        }
    found = run_cases(cases[1], directory, 1) | run_cases(cases[2], directory, 2)
    return {**found, "directory": directory}


@pytest.mark.parametrize(("name", "processes"), TABLE)
def test_an_infinite_gradient_on_one_rank_refuses_the_step_on_all(
    results: dict[str, Any], name: str, processes: int
) -> None:
    result = results[name]
    assert result["skipped"] == [[False] * processes, [True] * processes, [False] * processes]
    assert result["unchanged"] == [[False] * processes, [True] * processes, [False] * processes]
    assert not math.isfinite(result["grad_norms"][1])
    assert all(math.isfinite(loss) for loss in result["losses"])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_copy_that_does_not_count_must_be_finite(bad: float) -> None:
    """A norm's weight is whole on each tensor-parallel rank and counts on the first only."""
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    assert whole_norm([parameter], tp_rank=0, replica=None) == pytest.approx(3**0.5)
    assert whole_norm([parameter], tp_rank=1, replica=None) == 0.0
    parameter.grad[1] = bad
    assert not math.isfinite(whole_norm([parameter], tp_rank=1, replica=None))


@pytest.mark.parametrize("zero", [0, 1])
def test_fp16_finds_its_loss_scale_and_learns(results: dict[str, Any], zero: int) -> None:
    result = results[f"fp16_zero{zero}"]
    skipped = [any(ranks) for ranks in result["skipped"]]
    assert skipped[0] and not skipped[-1]
    assert result["loss_scale"] == 2.0**24 / 2 ** sum(skipped)
    assert result["losses"][-1] < result["losses"][0] - 0.1
    assert result["grad_norms"][-1] < 10, "the norm is that of the unscaled gradient"


@pytest.mark.parametrize(("name", "background"), FULL_DISKS)
def test_a_rank_that_cannot_write_fails_the_save_on_all(
    results: dict[str, Any], name: str, background: bool
) -> None:
    errors = results[f"full_disk_{name}_{background}"]["save_errors"]
    for error in errors:
        assert "rank 1: OSError" in error and "No space left" in error and "rank 0:" not in error
    left = results["directory"] / f"{name}_{background}"
    assert not (left / "latest").exists()
    assert list(left.glob("global_step*")) == []


def test_a_diverged_run_stops_and_names_the_last_good_checkpoint(tmp_path: Path) -> None:
    config = run_config(
        write_data(tmp_path),
        tmp_path / "run",
        optimizer={"type": "SGD", "params": {"lr": 1e30, "betas": [0.0, 0.9]}},
        checkpoint_factor=1,
        max_consecutive_nonfinite=3,
        gradient_clipping=0.0,
        train_iters=20,
    )
    codes, outputs = finish(start_run(config, tmp_path))
    assert codes == [EXIT_DIVERGED] == [76]
    assert "the step was skipped (3 in a row)" in outputs[0]
    assert f"The last good checkpoint: {tmp_path / 'run' / 'global_step1'}" in outputs[0]
    assert [p.name for p in (tmp_path / "run").glob("global_step*")] == ["global_step1"]
    codes, outputs = finish(start_run({**config, "detect_anomaly": True}, tmp_path))
    assert codes == [EXIT_DIVERGED], outputs[0]
    assert "detect_anomaly: the output (" in outputs[0] and "is not finite" in outputs[0]
    assert "Traceback" not in outputs[0]


class _Root(nn.Module):
    """sqrt at 0: a finite output with an infinite gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().sqrt()


def test_the_first_bad_layer_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.GELU()))
    name_first_bad_layer(model)
    model(torch.ones(2, 3)).sum().backward()
    with torch.no_grad():
        model[1][0].weight[0, 0] = float("inf")  # type: ignore[index]
    with pytest.raises(NonFiniteError, match=r"output \(Linear\) of 1\.0 is not finite"):
        model(torch.ones(2, 3))


def test_the_first_bad_gradient_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), _Root(), nn.Identity())
    nn.init.zeros_(model[0].weight)  # type: ignore[arg-type]
    nn.init.zeros_(model[0].bias)  # type: ignore[arg-type]
    name_first_bad_layer(model)
    with pytest.raises(NonFiniteError, match=r"gradient \(Linear\) of 0 is not finite"):
        model(torch.ones(2, 3)).sum().backward()


class _Recorder:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, step: int, values: dict[str, Any]) -> None:
        self.lines.append({"step": step, **values})

    def close(self) -> None:
        return None


def test_a_loss_spike_is_logged() -> None:
    recorder = _Recorder()
    hook = RecordMetrics(Sinks([recorder]), 1000, flops_per_token=1.0)
    trainer: Any = type("T", (), {"say": print, "train_iters": 10_000})
    for step in range(1, 203):
        loss = 9.0 if step == 150 else 3.0 + 0.01 * math.sin(step)
        report = StepReport(step, loss, 0.1, 1.0, 0.1, 64, skipped=False)
        hook.after_step(trainer, report)
    spikes = [line for line in recorder.lines if "loss_spike" in line]
    assert [line["step"] for line in spikes] == [150]
    assert spikes[0]["loss_spike"] == 9.0
    assert spikes[0]["recent_loss"] == pytest.approx(3.0, abs=0.05)
