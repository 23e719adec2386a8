"""Learning rates over a run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.training.optimizer import RULES, Schedule, Scheduler

STYLES = ("constant", "linear", "cosine", "exponential")


def schedule(style: str, *, rule: str, warmup: float = 10, **changes: Any) -> Schedule:
    values = {"peak": 6e-4, "minimum": 6e-5, "warmup_steps": warmup, "decay_steps": 110}
    return Schedule(**{**values, "style": style, "rule": rule, **changes})


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("style", STYLES)
def test_every_rule_rises_to_the_peak_and_falls_no_lower_than_the_minimum(
    rule: str, style: str
) -> None:
    rates = [schedule(style, rule=rule)(step) for step in range(110)]
    assert max(rates) == pytest.approx(6e-4)
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert min(rates[10:]) >= 6e-5 - 1e-12


@pytest.mark.parametrize(
    ("rule", "style", "step", "rate"),
    [
        # GPT-NeoX: the decay takes decay_steps - warmup steps; only cosine ends at the minimum.
        ("neox", "cosine", 0, 6e-4 * 1 / 10),
        ("neox", "cosine", 1, 6e-4 * 1 / 10),
        ("neox", "cosine", 10, 6e-4),
        ("neox", "cosine", 60, 6e-5 + 2.7e-4),
        ("neox", "cosine", 110, 6e-5),
        ("neox", "linear", 60, 3e-4),
        ("neox", "linear", 109, 6e-5),
        ("neox", "exponential", 60, 6e-4 * math.exp(-0.693 / 2)),
        ("neox", "exponential", 110, 6e-4 * math.exp(-0.693)),
        # The fork: rate 0 first, a decay over all of decay_steps that stops early.
        ("kerple", "cosine", 0, 0.0),
        ("kerple", "cosine", 1, 6e-4 / 10),
        ("kerple", "cosine", 65, 3e-4),
        ("kerple", "cosine", 80, 3e-4 * (math.cos(math.pi * 70 / 110) + 1)),
        ("kerple", "cosine", 99, 6e-5),
        ("kerple", "linear", 65, 3e-4),
        ("kerple", "linear", 100, 6e-4 * 20 / 110),
        ("kerple", "linear", 109, 6e-4 * 20 / 110),
        ("kerple", "exponential", 65, 6e-4 * math.exp(-0.693 / 2)),
        ("kerple", "constant", 109, 6e-4),
        # Ours before the key: no step is lost at either end.
        ("earlier", "cosine", 0, 6e-4 / 10),
        ("earlier", "cosine", 9, 6e-4),
        ("earlier", "linear", 60, 3.3e-4),
        ("earlier", "exponential", 60, 6e-5 + 5.4e-4 * math.exp(-2.5)),
    ],
)
def test_rates_of_single_steps(rule: str, style: str, step: int, rate: float) -> None:
    assert schedule(style, rule=rule)(step) == pytest.approx(rate, rel=1e-12, abs=1e-18)


def test_the_papers_rate_near_the_end_is_half_as_high_again_as_our_earlier_one() -> None:
    paper = {"peak": 6e-4, "minimum": 0.0, "warmup": 500, "decay_steps": 50_000}
    fork = schedule("cosine", rule="kerple", **paper)(48_000)
    assert fork / schedule("cosine", rule="earlier", **paper)(48_000) == pytest.approx(
        1.53, rel=0.01
    )


def test_warmup_need_not_be_a_whole_number_of_steps() -> None:
    assert schedule("cosine", rule="neox", warmup=1.5)(1) == pytest.approx(6e-4 / 1.5)
    assert schedule("cosine", rule="neox", warmup=1.5)(2) < 6e-4


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("style", STYLES)
def test_warmup_may_be_nothing_or_everything(rule: str, style: str) -> None:
    assert schedule(style, rule=rule, warmup=0)(0) == pytest.approx(6e-4)
    assert all(math.isfinite(schedule(style, rule=rule, warmup=110)(step)) for step in range(150))


def test_only_gpt_neoxs_cosine_rises_after_its_end() -> None:
    neox = schedule("cosine", rule="neox")
    assert neox(150) > neox(110)
    assert neox.rises_again(150) and not neox.rises_again(110)
    assert not schedule("cosine", rule="kerple").rises_again(150)
    assert not schedule("linear", rule="neox").rises_again(150)


def fresh(**options: Any) -> Scheduler:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    return Scheduler(optimizer, schedule("cosine", rule="neox", **options))


def test_a_restored_scheduler_continues() -> None:
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


@pytest.mark.parametrize("keep_saved", [False, True])
def test_a_changed_schedule_holds_on_resume_unless_the_checkpoints_is_asked_for(
    keep_saved: bool,
) -> None:
    state = fresh(peak=1e-3).state_dict()
    scheduler = fresh()
    scheduler.keep_saved = keep_saved
    scheduler.load_state_dict({**state, "steps": 10})
    assert scheduler.get_lr() == [pytest.approx(1e-3 if keep_saved else 6e-4)]


def test_a_state_from_before_the_schedule_was_saved_loads() -> None:
    scheduler = fresh()
    scheduler.load_state_dict({"steps": 10})
    assert scheduler.get_lr() == [pytest.approx(6e-4)]
