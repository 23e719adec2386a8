"""The optimizers by name, who is decayed, the rate over a run, and the kernel's own."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron.backends.optimizer_states import plain_groups
from megatron.backends.optimizers import build_optimizer
from megatron.errors import ConfigError
from megatron.mpu.parallel_layers import declare
from megatron.neox_arguments import NeoXArgs
from megatron.training.optimizer import (
    RULES,
    Schedule,
    Scheduler,
    parameter_groups,
    scale_kernel_steps,
)
from tests.processes import REPOSITORY
from tests.training.cases import ADAM, ON_TWO, layout, precision, run_cases, tiny_config, write_data
from tests.training.runs import losses, run, run_config


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["fused_adam", "cpu_adam"])
def test_deepspeeds_adam_trains_resumes_and_changes_layout(tmp_path: Path, kind: str) -> None:
    settings = {"lr": 0.01, "betas": [0.9, 0.95]}
    plain = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    data, save, moved = write_data(tmp_path), tmp_path / "run", tmp_path / "moved"
    run(run_config(data, tmp_path / "torch", train_iters=6, **plain), tmp_path)
    config = run_config(
        data, save, train_iters=6, optimizer={"type": kind, "params": settings}, **plain
    )
    run({**config, "train_iters": 2}, tmp_path, timeout=900)  # builds it
    assert "resuming after step 2" in run({**config, "train_iters": 4}, tmp_path)
    tool = [sys.executable, "tools/reshard_checkpoint.py", str(save), str(moved)]
    subprocess.run(tool, cwd=REPOSITORY, check=True, timeout=300)
    ending = {**config, **layout(zero=1), "load": str(moved), "save": str(tmp_path / "end")}
    assert "resuming after step 4" in run(ending, tmp_path)
    found = losses(save) | losses(tmp_path / "end")
    assert found == pytest.approx(losses(tmp_path / "torch"), rel=1e-4)


# Learning rates over a run.


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


def test_a_scheduler_counts_from_nothing() -> None:
    scheduler = fresh()
    assert scheduler.steps == 0 and scheduler.get_lr() == [scheduler.schedule(0)]
    scheduler.step()
    assert scheduler.get_lr() == [scheduler.schedule(1)]
    assert scheduler.optimizer.param_groups[0]["lr"] == scheduler.schedule(1)


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_wsd_has_the_rates_of_transformers(style: str) -> None:
    """But for the warmup, which is GPT-NeoX's: theirs begins at the minimum."""
    from transformers import get_wsd_schedule

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=6e-4)
    parts = {"num_warmup_steps": 10, "num_stable_steps": 70, "num_decay_steps": 20}
    theirs = get_wsd_schedule(optimizer, **parts, decay_type=style, min_lr_ratio=0.1)
    ours = schedule("wsd", rule="neox", wsd_steps=20, wsd_style=style, decay_steps=100)
    for step in range(1, 120):
        optimizer.step()
        theirs.step()
        neox = schedule("constant", rule="neox")(step)
        expected = neox if step <= 10 else theirs.get_last_lr()[0]
        assert ours(step) == pytest.approx(expected), step
    assert schedule("wsd", rule="kerple", wsd_steps=20, decay_steps=100)(5) == ours(5)


@pytest.mark.parametrize(
    ("style", "half"), [("exponential", 2**0.5 - 1), ("minus_sqrt", 1 - 0.5**0.5)]
)
def test_wsd_decays_by_megatrons_formulas(style: str, half: float) -> None:
    ours = schedule("wsd", rule="neox", wsd_steps=20, wsd_style=style, decay_steps=100)
    assert ours(80) == 6e-4 and ours(100) == ours(500) == pytest.approx(6e-5)
    assert ours(90) == pytest.approx(6e-5 + half * (6e-4 - 6e-5))


def test_wsd_whose_parts_do_not_fit_is_refused() -> None:
    config = tiny_config("data", lr_decay_style="wsd", warmup=0.5, lr_wsd_decay_iters=5)
    with pytest.raises(ConfigError, match="warmup takes 4 and lr_wsd_decay_iters 5 of 8 steps"):
        NeoXArgs.from_dict(config)


def test_a_decay_branches_off_any_checkpoint_of_the_stable_part(tmp_path: Path) -> None:
    keys = {"lr_decay_style": "wsd", "keep_last_n_checkpoints": None, "warmup": 0.1}
    config = run_config(write_data(tmp_path), tmp_path / "stable", **keys, train_iters=10)
    run({**config, "lr_wsd_decay_iters": 2}, tmp_path)
    branch = {"load": str(tmp_path / "stable"), "save": str(tmp_path / "branch"), "iteration": 4}
    branch |= {"train_iters": 8, "lr_wsd_decay_iters": 4, "override_lr_scheduler": True}
    output = run({**config, **branch}, tmp_path)
    assert "resuming after step 4" in output
    stable, decayed = losses(tmp_path / "stable"), losses(tmp_path / "branch")
    assert list(decayed) == [5, 6, 7, 8]
    assert [stable[step] == decayed[step] for step in (5, 6, 7, 8)] == [True, True, False, False]
    lines = (tmp_path / "branch" / "metrics.jsonl").read_text().splitlines()
    rates = [line["lr"] for line in map(json.loads, lines) if "lr" in line]
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025])


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


# The kernel's own learning rate and weight decay, wherever its numbers are kept.


KERNEL_SCALE, KERNEL_DECAY, STEPS = 3.0, 0.4, 4
OWN = {"kerple_lr_scale": KERNEL_SCALE, "kerple_weight_decay": KERNEL_DECAY}
LAYOUTS_OF_ONE = {"zero1": layout(zero=1), "zero2": layout(zero=2), "zero3": layout(zero=3)}
LAYOUTS_OF_TWO = {name: how for name, how in ON_TWO.items() if name != "mp2"}
BF16 = {
    f"bf16_{name}": {**LAYOUTS_OF_TWO[name], **precision("bf16")} for name in ("dp2_zero1", "pp2")
}


@pytest.mark.parametrize(
    ("scale", "decay"), [(KERNEL_SCALE, KERNEL_DECAY), (2.0, 0.0), (1.0, 1.0), (1.0, 0.0)]
)
def test_a_kernel_takes_the_steps_of_adamw_with_its_own_rate_and_decay(
    scale: float, decay: float
) -> None:
    """The twin: torch's AdamW with a group of its own for the kernel."""

    def parameters() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        found = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((7, 5), (4,))]
        declare(found[1], decay=False, rate="kernel")
        return found

    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
    ours, theirs = parameters(), parameters()
    groups = parameter_groups([("weight", ours[0]), ("r1", ours[1])], 0.1)
    mine = build_optimizer("adam", groups, settings)
    spans = [(group.master, group.own_spans()) for group in plain_groups(mine)]
    engine: Any = SimpleNamespace(optimizer=mine, master_spans=lambda: spans)
    scale_kernel_steps(engine, scale=scale, decay=decay)
    weight = {"params": theirs[:1], "weight_decay": 0.1}
    kernel = {"params": theirs[1:], "weight_decay": decay, "lr": scale * 0.01}
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
        **{name: case(settings) for name, settings in LAYOUTS_OF_ONE.items()},
    }
    two = {name: case(settings) for name, settings in {**LAYOUTS_OF_TWO, **BF16}.items()}
    for name in ("dp2_zero1", "pp2_zero1"):
        saved = str(directory / name)
        two[f"{name}-first"] = case(LAYOUTS_OF_TWO[name], STEPS // 2, save=saved)
        two[f"{name}-second"] = case(LAYOUTS_OF_TWO[name], STEPS // 2, resume=saved)
    return run_cases(one, directory, 1) | run_cases(two, directory, 2)


def test_the_first_step_is_scaled_and_decayed(results: dict[str, Any]) -> None:
    own, plain = results["first_step"], results["plain_first_step"]
    for name, start in own["kernels_before"].items():
        before, after = torch.tensor(start), torch.tensor(plain["kernels"][name])
        expected = before + KERNEL_SCALE * (after - before - 0.01 * KERNEL_DECAY * before)
        torch.testing.assert_close(torch.tensor(own["kernels"][name]), expected)


def test_a_scale_of_nothing_keeps_the_kernel(results: dict[str, Any]) -> None:
    assert results["frozen"]["kernels"] == results["frozen"]["kernels_before"]
    assert results["frozen"]["losses"][-1] < results["frozen"]["losses"][0]


@pytest.mark.parametrize("name", [*LAYOUTS_OF_ONE, *LAYOUTS_OF_TWO, *BF16])
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
