"""The commands of each step, as argument lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import ReproduceError
from megatron.paper.execute import Launcher, prepare_command, step_command
from megatron.paper.suite import TRAIN, Step, load_suite


def test_commands_are_argument_lists_without_a_shell(tmp_path: Path) -> None:
    suite = load_suite("paper", ["main", "github"], runs_root=tmp_path)
    run = suite.runs[0]
    config = str(run.directory / "config.yml")
    train = step_command(Launcher(python="py"), run, TRAIN)
    assert train[:5] == ["py", "-u", "deepy.py", "train.py", config]
    step = Step("positionwise", 4096, 512)
    evaluate = step_command(Launcher(python="py"), run, step)
    joined = " ".join(evaluate)
    assert "--eval_tasks positionwise" in joined
    assert "eval_lengths=[4096] eval_window=512" in joined
    srun = step_command(Launcher(srun=True, container=["box"], python="py"), run, TRAIN)
    assert srun[0] == "srun"
    assert srun[-5:] == ["box", "py", "-u", "train.py", config]
    prepare = prepare_command(suite.file.data["github"], suite.data_root, run.config, "py")
    assert prepare[:5] == ["py", "-u", "prepare_data.py", "github", "-d"]
    assert "--vocab-file" in prepare


def test_srun_repeats_what_it_does_not_inherit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load_suite("paper", ["large"]).runs[0]
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    command = step_command(Launcher(srun=True, one_gpu_per_task=True), run, TRAIN)
    assert {"--cpus-per-task=6", "--gpus-per-task=1", "--ntasks=2"} <= set(command)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK")
    assert not any(
        "gpus" in word or "cpus" in word for word in step_command(Launcher(srun=True), run, TRAIN)
    )


def test_a_run_that_continues_another_loads_it_once_it_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = load_suite("rope_to_kerple", ["flat2"], runs_root=tmp_path)
    run = suite.runs[0]
    assert run.base is not None
    with pytest.raises(ReproduceError, match=r"begins with base.stdlib.rotary.1235, which is not"):
        step_command(Launcher(python="py"), run, TRAIN)
    monkeypatch.setattr("megatron.paper.execute.trained", lambda base: base == run.base)
    train = step_command(Launcher(python="py"), run, TRAIN)
    assert f'load="{run.base.directory.as_posix()}"' in train
    assert not any(word.startswith("load=") for word in step_command(Launcher(), run, run.steps[1]))
