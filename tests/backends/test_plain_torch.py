"""Plain torch takes DeepSpeed's steps to the bit, in DeepSpeed's files, without importing it."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from megatron.backends.plain_torch import clip_by_whole_norm, whole_norm
from megatron.errors import ConfigError
from megatron.mpu.job import check_plain_torch
from megatron.neox_arguments import NeoXArgs
from tests.processes import REPOSITORY
from tests.stories.test_golden import demo_config
from tests.training.cases import ADAM, DROPOUT, run_cases, tiny_config, write_data
from tests.training.runs import losses, run_config

TORCH = {"training_backend": "torch"}
OWN_RATE = {"kerple_lr_scale": 3.0, "kerple_weight_decay": 0.4, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Both backends on the same configs, and each on the other's checkpoint."""
    directory = tmp_path_factory.mktemp("plain")
    data = write_data(directory)
    tiny = tiny_config(data, optimizer=ADAM, **OWN_RATE, **DROPOUT)
    demo = {**demo_config(directory), "train_iters": 6, "save": None, "load": None}
    saved = {name: str(directory / f"{name}-saved") for name in ("torch", "deepspeed")}

    def cases(name: str, other: str, backend: dict[str, Any]) -> dict[str, Any]:
        config = {**tiny, **backend}
        return {
            f"{name}": {"config": config, "steps": 4, "validate": True},
            f"{name}-demo": {"config": {**demo, **backend}, "steps": 6},
            f"{name}-poisoned": {"config": config, "steps": 3, "poison": [1]},
            f"{name}-first": {"config": config, "steps": 2, "save": saved[name]},
            f"{name}-of-{other}": {"config": config, "steps": 2, "resume": saved[other]},
        }

    plain, deep = cases("torch", "deepspeed", TORCH), cases("deepspeed", "torch", {})
    later = {"torch-of-deepspeed": plain.pop("torch-of-deepspeed")}
    found = run_cases(plain, directory / "1", 1)
    found |= run_cases(deep, directory / "2", 1)
    return found | run_cases(later, directory / "3", 1)


SAME = ("losses", "grad_norms", "skipped", "kernels")


@pytest.mark.parametrize("case", ["", "-demo", "-poisoned"])
def test_the_same_numbers_as_deepspeed_to_the_bit(results: dict[str, Any], case: str) -> None:
    plain, deep = results[f"torch{case}"], results[f"deepspeed{case}"]
    for key in SAME:
        if not (case == "-poisoned" and key == "grad_norms"):
            assert plain[key] == deep[key], key
    assert plain["fingerprints"][0]["weights"] == deep["fingerprints"][0]["weights"]
    assert plain["fingerprints"][0]["moments"] == deep["fingerprints"][0]["moments"]
    assert plain.get("valid_loss") == deep.get("valid_loss")


def test_a_step_that_is_not_finite_changes_nothing(results: dict[str, Any]) -> None:
    result = results["torch-poisoned"]
    assert result["skipped"] == [[False], [True], [False]] == result["unchanged"]
    assert not math.isfinite(result["grad_norms"][1])


@pytest.mark.parametrize(("name", "other"), [("torch", "deepspeed"), ("deepspeed", "torch")])
def test_a_run_goes_on_with_the_other_backend(
    results: dict[str, Any], name: str, other: str
) -> None:
    resumed, whole = results[f"{name}-of-{other}"], results[other]
    assert resumed["losses"] == whole["losses"][2:]
    assert resumed["fingerprints"] == whole["fingerprints"]


WITHOUT_DEEPSPEED = """
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec

class Hidden(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] == "deepspeed":
            return None
        return super().find_spec(name, path, target)

sys.meta_path[:] = [Hidden if finder is PathFinder else finder for finder in sys.meta_path]
assert find_spec("deepspeed") is None
from megatron.commands.model_scripts import train
from megatron.terminal import run_command
sys.exit(run_command(train, sys.argv[1:]))
"""


def test_a_machine_without_deepspeed_trains_resumes_and_says_so_in_one_line(tmp_path: Path) -> None:
    save, config = tmp_path / "run", tmp_path / "config.yml"
    values = run_config(write_data(tmp_path), save, train_iters=2)
    for steps in (2, 4):
        config.write_text(yaml.safe_dump({**values, "train_iters": steps}))
        command = [sys.executable, "-c", WITHOUT_DEEPSPEED, str(config)]
        done = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        told = [line for line in done.stdout.splitlines() if "DeepSpeed" in line]
        assert told == ["DeepSpeed is not installed: training with torch alone"]
    assert sorted(losses(save)) == [1, 2, 3, 4]
    config.write_text(yaml.safe_dump({**values, "precision": "bf16"}))
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "precision = bf16: needs DeepSpeed (no DeepSpeed here)" in done.stderr


@pytest.mark.parametrize(
    ("changes", "processes", "words"),
    [
        ({"precision": "bf16"}, 1, "precision = bf16"),
        ({"zero_optimization": {"stage": 1}}, 1, "zero_optimization.stage = 1"),
        ({"pipe_parallel_size": 1}, 1, "pipe_parallel_size = 1"),
        ({}, 2, "2 processes"),
        ({"optimizer": {"type": "cpu_adam"}}, 1, "optimizer.type = cpu_adam"),
    ],
)
def test_what_needs_deepspeed_is_refused(
    changes: dict[str, Any], processes: int, words: str
) -> None:
    args = NeoXArgs.from_dict(tiny_config("data", **{**TORCH, **changes}))
    with pytest.raises(ConfigError, match=f"{words}: needs DeepSpeed .training_backend = torch"):
        check_plain_torch(args, processes)


# Clipping by the whole norm.


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_copy_that_does_not_count_must_be_finite(bad: float) -> None:
    """A norm's weight is whole on each tensor-parallel rank and counts on the first only."""
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    assert whole_norm([parameter], tp_rank=0, replica=None) == pytest.approx(3**0.5)
    assert whole_norm([parameter], tp_rank=1, replica=None) == 0.0
    parameter.grad[1] = bad
    assert not math.isfinite(whole_norm([parameter], tp_rank=1, replica=None))


def test_gradients_above_the_norm_are_scaled_to_it() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 3.0)
    assert clip_by_whole_norm([parameter], 0.0) == 6.0 and parameter.grad[0] == 3.0
    assert clip_by_whole_norm([parameter], 7.0) == 6.0 and parameter.grad[0] == 3.0
    assert clip_by_whole_norm([parameter], 2.0) == 6.0
    assert float(parameter.grad.norm()) == pytest.approx(2.0, rel=1e-5)
