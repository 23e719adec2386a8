"""Save under one layout, resume under another, optimizer included."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.optimizer_view import WEIGHT
from tests.processes import REPOSITORY
from tests.training.cases import ADAM, layout, precision, run_cases, tiny_config, write_data
from tests.training.runs import finish, losses, run, run_config, start_run

HALF = 3
TWO = {
    "dp2": layout(),
    "dp2_zero1": layout(zero=1),
    "dp2_zero2": layout(zero=2),
    "dp2_zero3": layout(zero=3),
    "mp2": layout(mp=2),
    "mp2_zero1": layout(mp=2, zero=1),
    "pp2": layout(pp=2),
    "pp2_zero1": layout(pp=2, zero=1),
    "bf16_pp2": {**layout(pp=2), **precision("bf16")},
    "bf16_mp2_zero1": {**layout(mp=2, zero=1), **precision("bf16")},
}
ONE = {  # where each of those goes: another way to keep the optimizer each time
    "dp2": layout(zero=3),
    "dp2_zero1": layout(),
    "dp2_zero2": layout(pp=1),
    "dp2_zero3": layout(zero=1),
    "mp2": layout(),
    "mp2_zero1": layout(zero=2),
    "pp2": layout(),
    "pp2_zero1": layout(pp=1, zero=1),
    "bf16_pp2": {**layout(), **precision("bf16")},
    "bf16_mp2_zero1": {**layout(zero=3), **precision("bf16")},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("reshard")
    data = write_data(root)

    def case(place: dict[str, Any], **keys: Any) -> dict[str, Any]:
        common = {"optimizer": ADAM, "weight_decay": 0.1, "lr_decay_style": "cosine"}
        tied = {"no_weight_tying": False}  # the harder case: the head is the embedding
        return {"config": tiny_config(data, **common, **tied, **place), **keys}

    there = {
        name: case(place, steps=HALF, export=str(root / "from" / name))
        for name, place in TWO.items()
    }
    found: dict[str, Any] = run_cases(there, root / "a", 2)
    one: dict[str, Any] = {
        "whole": case(layout(), steps=2 * HALF),
        "source": case(layout(), steps=HALF, export=str(root / "from" / "one")),
    }
    for name, place in ONE.items():
        source = str(root / "from" / name)
        one[f"copy_{name}"] = case(place, steps=0, resume=source, export=str(root / "copy" / name))
        one[f"to_one_{name}"] = case(place, steps=HALF, resume=source)
    found |= run_cases(one, root / "b", 1)
    back = {}
    for name, place in TWO.items():
        source = str(root / "from" / "one")
        back[f"back_{name}"] = case(place, steps=HALF, resume=source)
        back[f"back_copy_{name}"] = case(
            place, steps=0, resume=source, export=str(root / "back" / name)
        )
    return {**found, **run_cases(back, root / "c", 2), "root": root}


def _files(directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    found = sorted((directory / f"global_step{HALF}" / "portable").glob("*.pt"))
    return {file.name: torch.load(file, weights_only=True) for file in found}


def _assert_equal(copy: Path, source: Path) -> None:
    """Every number of every parameter, to the bit."""
    expected, found = _files(source), _files(copy)
    assert len(expected) > 20
    assert found.keys() == expected.keys()
    for name, states in expected.items():
        assert states.keys() == {WEIGHT, "exp_avg", "exp_avg_sq", "step"}
        assert found[name].keys() == states.keys(), name
        for key, value in states.items():
            assert torch.equal(found[name][key], value), f"{name} {key}"
        assert states["step"] == HALF and states["exp_avg"].abs().sum() > 0


@pytest.mark.parametrize("name", TWO)
def test_nothing_is_lost_on_the_way_to_one_process(results: dict[str, Any], name: str) -> None:
    _assert_equal(results["root"] / "copy" / name, results["root"] / "from" / name)


@pytest.mark.parametrize("name", TWO)
def test_nothing_is_lost_on_the_way_back(results: dict[str, Any], name: str) -> None:
    _assert_equal(results["root"] / "back" / name, results["root"] / "from" / "one")


@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("way", ["to_one", "back"])
def test_training_goes_on_as_if_nothing_had_happened(
    results: dict[str, Any], name: str, way: str
) -> None:
    whole = results["whole"]["losses"]
    resumed = results[f"{way}_{name}"]["losses"]
    close = 2e-2 if "bf16" in name else 5e-5
    assert resumed == pytest.approx(whole[HALF:], rel=close)
    if "bf16" not in name:
        assert resumed[0] != pytest.approx(whole[0], rel=1e-3)


def test_one_command(tmp_path: Path) -> None:
    """mp2 -> mp1 through the tool, after the error that asks for it."""
    data, save = write_data(tmp_path), tmp_path / "run"
    config = run_config(
        data, save, train_iters=4, attention_dropout=0.0, hidden_dropout=0.0, **layout(mp=2)
    )
    run(config, tmp_path, processes=2)
    single = {**config, **layout(), "train_iters": 6, "save": str(tmp_path / "next")}
    codes, outputs = finish(start_run({**single, "load": str(save)}, tmp_path))
    assert codes == [2]
    assert "model_parallel_size 2 -> 1" in outputs[0]
    assert "tools/reshard_checkpoint.py" in outputs[0]
    tool = [sys.executable, "tools/reshard_checkpoint.py", str(save), str(tmp_path / "portable")]
    done = subprocess.run(tool, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "resuming after step 4" in run({**single, "load": str(tmp_path / "portable")}, tmp_path)
    assert sorted(losses(tmp_path / "next")) == [5, 6]
    again = subprocess.run(
        [*tool[:2], str(tmp_path / "portable"), str(tmp_path / "x")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert again.returncode == 2 and "portable already" in again.stderr
