"""The kernel's own learning rate and weight decay, wherever its numbers are kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron.training.optimizer import build_optimizer, parameter_groups, scale_kernel_steps
from tests.training.cases import ADAM, ON_TWO, layout, precision, run_cases, tiny_config, write_data

SCALE, DECAY, STEPS = 3.0, 0.4, 4
OWN = {"kerple_lr_scale": SCALE, "kerple_weight_decay": DECAY}
ONE = {"zero1": layout(zero=1), "zero2": layout(zero=2), "zero3": layout(zero=3)}
TWO = {name: how for name, how in ON_TWO.items() if name != "mp2"}
BF16 = {f"bf16_{name}": {**TWO[name], **precision("bf16")} for name in ("dp2_zero1", "pp2")}


def test_a_kernel_takes_the_steps_of_adamw_with_its_own_rate_and_decay() -> None:
    """The twin: torch's AdamW with a group of its own for the kernel."""

    def parameters() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        found = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((7, 5), (4,))]
        found[1].is_kernel_parameter = True  # type: ignore[attr-defined]
        return found

    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
    ours, theirs = parameters(), parameters()
    groups = parameter_groups([("weight", ours[0]), ("r1", ours[1])], 0.1)
    mine = build_optimizer("adam", groups, **settings)
    engine = SimpleNamespace(optimizer=mine, basic_optimizer=mine)
    scale_kernel_steps(engine, scale=SCALE, decay=DECAY)
    weight = {"params": theirs[:1], "weight_decay": 0.1}
    kernel = {"params": theirs[1:], "weight_decay": DECAY, "lr": SCALE * 0.01}
    twin = torch.optim.AdamW([weight, kernel], **settings)
    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        mine.step()
        twin.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("kernel_rate")
    data = write_data(directory)

    def case(settings: dict[str, Any], steps: int = STEPS, **more: Any) -> dict[str, Any]:
        config = tiny_config(data, optimizer=ADAM, weight_decay=0.1, **{**OWN, **settings})
        return {"config": config, "steps": steps, **more}

    plain = {"kerple_lr_scale": 1.0, "kerple_weight_decay": 0.0}
    one = {
        "one": case(layout()),
        "bf16_one": case({**layout(), **precision("bf16")}),
        "first_step": case(layout(), 1),
        "plain_first_step": case({**layout(), **plain}, 1),
        "frozen": case({**layout(), **plain, "kerple_lr_scale": 0.0}),
        **{name: case(settings) for name, settings in ONE.items()},
    }
    two = {name: case(settings) for name, settings in {**TWO, **BF16}.items()}
    for name in ("dp2_zero1", "pp2_zero1"):
        saved = str(directory / name)
        two[f"{name}-first"] = case(TWO[name], STEPS // 2, save=saved)
        two[f"{name}-second"] = case(TWO[name], STEPS // 2, resume=saved)
    return run_cases(one, directory, 1) | run_cases(two, directory, 2)


def test_the_first_step_is_scaled_and_decayed(results: dict[str, Any]) -> None:
    own, plain = results["first_step"], results["plain_first_step"]
    for name, start in own["kernels_before"].items():
        before, after = torch.tensor(start), torch.tensor(plain["kernels"][name])
        expected = before + SCALE * (after - before - 0.01 * DECAY * before)
        torch.testing.assert_close(torch.tensor(own["kernels"][name]), expected)


def test_a_scale_of_nothing_keeps_the_kernel(results: dict[str, Any]) -> None:
    assert results["frozen"]["kernels"] == results["frozen"]["kernels_before"]
    assert results["frozen"]["losses"][-1] < results["frozen"]["losses"][0]


@pytest.mark.parametrize("name", [*ONE, *TWO, *BF16])
def test_every_layout_moves_the_kernel_alike(results: dict[str, Any], name: str) -> None:
    half = name.startswith("bf16")
    reference, result = results["bf16_one" if half else "one"], results[name]
    assert result["losses"] == pytest.approx(reference["losses"], rel=2e-2 if half else 2e-5)
    assert result["replicas_agree"]
    for key, values in result["kernels"].items():
        tolerance = 1e-2 if half else 1e-4
        assert values == pytest.approx(reference["kernels"][key], rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("name", ["dp2_zero1", "pp2_zero1"])
def test_a_resumed_run_goes_on_to_the_bit(results: dict[str, Any], name: str) -> None:
    whole, second = results[name], results[f"{name}-second"]
    assert results[f"{name}-first"]["losses"] + second["losses"] == whole["losses"]
    assert second["kernels"] == whole["kernels"]
    assert second["fingerprints"] == whole["fingerprints"]
