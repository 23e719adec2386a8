"""Learning rates over a run."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.training.optimizer import DECAYS, Schedule, Scheduler


def schedule(style: str, warmup: int = 10) -> Schedule:
    return Schedule(peak=6e-4, minimum=6e-5, warmup_steps=warmup, decay_steps=110, style=style)


@pytest.mark.parametrize("style", DECAYS)
def test_every_style_warms_up_to_the_peak_and_never_below_the_minimum(style: str) -> None:
    rates = [schedule(style)(step) for step in range(200)]
    assert rates[0] == pytest.approx(6e-5)  # a tenth of the way
    assert rates[9] == rates[10] == pytest.approx(6e-4)
    assert min(rates) >= 6e-5 - 1e-12
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(6e-4 if style == "constant" else 6e-5)


def test_cosine_is_half_way_in_the_middle() -> None:
    assert schedule("cosine")(60) == pytest.approx((6e-4 + 6e-5) / 2)
    quarter = 6e-5 + (6e-4 - 6e-5) * (1 + math.cos(math.pi / 4)) / 2
    assert schedule("cosine")(35) == pytest.approx(quarter)


def test_without_warmup_the_first_step_has_the_peak() -> None:
    assert schedule("linear", warmup=0)(0) == pytest.approx(6e-4)


def test_a_restored_scheduler_continues() -> None:
    def fresh() -> Scheduler:
        return Scheduler(torch.optim.SGD([torch.zeros(1, requires_grad=True)]), schedule("cosine"))

    straight, first = fresh(), fresh()
    for _ in range(40):
        straight.step()
    for _ in range(25):
        first.step()
    resumed = fresh()
    resumed.load_state_dict(first.state_dict())
    for _ in range(15):
        resumed.step()
    assert resumed.get_lr() == straight.get_lr()
    assert resumed.optimizer.param_groups[0]["lr"] == straight.optimizer.param_groups[0]["lr"]
