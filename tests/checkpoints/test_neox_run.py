"""Runs that GPT-NeoX trained with DeepSpeed: their optimizer as DeepSpeed itself loads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from megatron.checkpoints.neox_run import (
    _check_schedule,
    is_neox_run,
    read_neox_progress,
    read_neox_states,
)
from megatron.checkpoints.sharding import canonical_shard, share_positions, strip_prefix
from megatron.errors import CheckpointError
from megatron.neox_arguments import NeoXArgs
from tests.fixture_archives import unpacked
from tests.processes import REPOSITORY, run_ranks
from tests.training.cases import write_data
from tests.training.runs import finish, run, start_run

RUNS = sorted(unpacked("neox_runs").iterdir())


def config_of(recorded: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(
        (recorded / "global_step3" / "configs" / "model.yml").read_text()
    )
    return config


@pytest.mark.parametrize("recorded", RUNS, ids=lambda path: path.name)
def test_states_are_those_that_deepspeed_loads(recorded: Path) -> None:
    check_states(recorded)


BF16: dict[str, Any] = {"bf16": {"enabled": True}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero2": {"zero_optimization": {"stage": 2}},
    "zero2_bf16": {"zero_optimization": {"stage": 2}, **BF16},
    "zero1_fp16": {
        "zero_optimization": {"stage": 1}, "fp16": {"enabled": True, "initial_scale_power": 4}
    },
    "bf16_optimizer": {
        "zero_optimization": {"stage": 1}, **BF16, "data_types": {"grad_accum_dtype": "fp32"}
    },
    "round_robin": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}, **BF16},
}  # fmt: skip


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that two data-parallel ranks of DeepSpeed save and load, by layout."""
    folder = tmp_path_factory.mktemp("two_ranks")
    source = str(unpacked("neox_runs") / "zero1")
    worker = str(REPOSITORY / "tests" / "checkpoints" / "neox_run_worker.py")
    run_ranks([worker, str(folder), source, json.dumps(LAYOUTS)], 2)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_of_two_ranks_are_those_that_deepspeed_loads(
    layout: str, of_two_ranks: Path
) -> None:
    files = list((of_two_ranks / layout).rglob("*optim_states.pt"))
    assert len(files) == 2
    assert all(file.name.startswith("bf16_") for file in files) == ("bf16" in LAYOUTS[layout])
    if layout == "round_robin":
        with pytest.raises(CheckpointError, match="round_robin_gradients on 2 ranks"):
            check_states(of_two_ranks / layout)
        return
    check_states(of_two_ranks / layout)


def test_elastic_checkpoints_are_refused(tmp_path: Path) -> None:
    """DeepSpeed cannot load what it saves so of torch's Adam: nothing to compare with."""
    copy = tmp_path / "copy"
    shutil.copytree(unpacked("neox_runs") / "zero1", copy)
    (path,) = (copy / "global_step3").glob("*optim_states.pt")
    content = torch.load(path, weights_only=False)
    content["optimizer_state_dict"]["base_optimizer_state"] = []
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="was saved with elastic_checkpoint"):
        check_states(copy)


def check_states(recorded: Path) -> None:
    """What DeepSpeed's own engine held after loading the run."""
    args, directory = NeoXArgs.from_dict(config_of(recorded)), recorded / "global_step3"
    assert is_neox_run(directory)
    found = read_neox_states(directory, args.model)
    with np.load(recorded / "expected.npz") as arrays:
        expected = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    expected.pop("rate", None)
    for key in ("fp32", "exp_avg", "exp_avg_sq"):
        theirs = {
            strip_prefix(name.partition("|")[0], recorded): tensor
            for name, tensor in expected.items()
            if name.endswith(f"|{key}")
        }
        theirs = share_positions(canonical_shard(theirs, args.model))
        assert theirs.keys() == found.keys()
        for name, tensor in theirs.items():
            assert torch.equal(found[name][key], tensor), (name, key)
    assert {float(states["step"]) for states in found.values()} == {3.0}


@pytest.mark.parametrize("recorded", RUNS, ids=lambda path: path.name)
def test_a_run_goes_on_where_it_stood(recorded: Path, tmp_path: Path) -> None:
    """The fourth step, with the rate that GPT-NeoX's scheduler gives it."""
    config = {
        **config_of(recorded),
        "data_path": write_data(tmp_path),
        "vocab_size": 64,
        "load": str(recorded),
        "save": str(tmp_path / "run"),
        "train_iters": 10,
        "eval_interval": 100,
        "log_interval": 1,
    }
    output = run({**config, "exit_interval": 4}, tmp_path)
    assert "continuing GPT-NeoX's run after step 3" in output
    with np.load(recorded / "expected.npz") as arrays:
        rate = float(arrays["rate"].ravel()[0])
    lines = [yaml.safe_load(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    (first,) = [line for line in lines if line["step"] == 4 and "lr" in line]
    assert first["lr"] == pytest.approx(rate, rel=1e-6)


def test_another_schedule_is_refused() -> None:
    recorded = RUNS[0]
    args = NeoXArgs.from_dict({**config_of(recorded), "min_lr": 0.0})
    with pytest.raises(CheckpointError, match="minimum"):
        read_neox_progress(recorded / "global_step3", args.optimization)
    chosen = args.replace(use_checkpoint_lr_scheduler=True)
    progress = read_neox_progress(recorded / "global_step3", chosen.optimization)
    assert progress["schedule"]["schedule"]["minimum"] == 1e-4
    assert (progress["iteration"], progress["consumed_samples"]) == (3, 6)
    for warmup in (0.01, 0.25):
        args = NeoXArgs.from_dict({**config_of(recorded), "warmup": warmup})
        steps = warmup * args.optimization.decay_iters
        _check_schedule({"warmup_steps": steps}, args.optimization, recorded)
        with pytest.raises(CheckpointError, match="warmup_steps"):
            _check_schedule({"warmup_steps": steps + 1}, args.optimization, recorded)


def test_without_its_optimizer_files_it_is_refused(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(unpacked("neox_runs") / "zero1", copy)
    for file in (copy / "global_step3").glob("*optim_states.pt"):
        file.unlink()
    config = {**config_of(copy), "data_path": write_data(tmp_path), "vocab_size": 64}
    config |= {"load": str(copy), "save": str(tmp_path / "run"), "train_iters": 10}
    codes, outputs = finish(start_run(config, tmp_path))
    assert codes == [2]
    assert "finetune: true" in outputs[0]
