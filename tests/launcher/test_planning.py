"""What is started where: this machine, a hostfile, a Slurm allocation; as DeepSpeed reads it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from megatron.errors import ConfigError
from megatron.launcher import planning as launcher
from megatron.launcher.planning import plan_launch, read_hostfile
from megatron.neox_arguments import NeoXArgs
from tests.neox_arguments.samples import TINY


def config(**values: object) -> NeoXArgs:
    return NeoXArgs.from_dict({**TINY, **values})


def runner_options(arguments: list[str] | None) -> object:
    from deepspeed.launcher.runner import parse_args

    assert arguments is not None
    return parse_args([*arguments, "train.py", "--megatron_config", "x"])


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text("# comment\nn1 slots=4\nn2 slots=4 # fast\n\n")
    return path


def test_hostfile_with_pdsh(hostfile: Path) -> None:
    plan = plan_launch(["train.py"], config(hostfile=str(hostfile), num_gpus=2), {})
    options = runner_options(plan.runner_arguments)
    assert plan.world_size == 4
    assert (options.hostfile, options.launcher, options.num_gpus) == (str(hostfile), "pdsh", 2)
    assert options.user_args == ["--megatron_config", "x"]


def test_a_hostfile_that_is_not_there_means_this_machine(tmp_path: Path) -> None:
    """GPT-NeoX's 125M.yml names /mock_path."""
    plan = plan_launch(["train.py"], config(hostfile=str(tmp_path / "none")), {})
    assert plan.world_size == 1
    assert "does not exist: this machine alone" in plan.warnings[0]


def test_include_and_no_ssh_check(hostfile: Path) -> None:
    values = {"include": "n1@n2:0,1", "no_ssh_check": True, "master_addr": "10.0.0.1"}
    plan = plan_launch(["train.py"], config(hostfile=str(hostfile), **values), {})
    options = runner_options(plan.runner_arguments)
    assert plan.world_size == 6
    assert (options.include, options.no_ssh_check) == ("n1@n2:0,1", True)
    assert options.master_addr == "10.0.0.1"


def test_slurm_allocation_needs_neither_hostfile_nor_ssh() -> None:
    environ = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS_PER_NODE": "4"}
    values = {"launcher": "slurm", "account": "lab", "comment": "two words"}
    plan = plan_launch(["train.py"], config(**values, launcher_args="--partition=a100"), environ)
    options = runner_options(plan.runner_arguments)
    assert (plan.world_size, plan.hosts) == (8, {"n1": 4, "n2": 4})
    assert options.no_ssh_check and options.master_addr == "n1"
    assert options.launcher_args == (
        "--nodes=2 --ntasks-per-node=4 --partition=a100 --account=lab '--comment=two words'"
    )
    assert plan.args.launcher.master_addr == "n1"
    with pytest.raises(ConfigError, match="allocation"):
        plan_launch(["train.py"], config(launcher="slurm"), {})


def test_slurm_runner_of_deepspeed_takes_our_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.launcher.multinode_runner import SlurmRunner
    from deepspeed.launcher.runner import encode_world_info

    environ = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS_PER_NODE": "2"}
    plan = plan_launch(["train.py"], config(launcher="slurm", comment="a b"), environ)
    active = {"n1": [0, 1], "n2": [0, 1]}
    runner = SlurmRunner(
        runner_options(plan.runner_arguments), encode_world_info(active), {"n1": 2, "n2": 2}
    )
    command = runner.get_cmd({}, active)
    assert command[:3] == ["srun", "-n", "4"]
    assert "--comment=a b" in command and "--gpus-per-node" not in command
    assert command[-3:] == ["train.py", "--megatron_config", "x"]


def test_cpu_shares_cores_and_keeps_a_chosen_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.os, "cpu_count", lambda: 8)
    plan = plan_launch(
        ["train.py"], config(num_gpus=2, master_port=4321), {"DS_ACCELERATOR": "cpu"}
    )
    options = runner_options(plan.runner_arguments)
    assert (options.num_gpus, options.master_port) == (2, 4321)
    assert plan.environment == {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "4"}


@pytest.mark.parametrize(
    "text",
    ["", "n1\n", "n1 slots=x", "n1 slots=0", "n1 slots=" + "9" * 5000, "n1 slots=1\nn1 slots=1"],
)
def test_broken_hostfiles(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError, match="hostfile"):
        read_hostfile(path)


@pytest.mark.parametrize(
    "host", ["-oProxyCommand=touch${IFS}owned", "-x", "a;b", "a$(b)", "a\nb", "\u00e9", "a" * 300]
)
def test_a_host_that_is_no_host_is_refused(tmp_path: Path, host: str) -> None:
    file = tmp_path / "hostfile"
    file.write_text(f"good-1.example slots=2\n{host} slots=1\n")
    with pytest.raises(ConfigError, match="hostfile"):
        read_hostfile(file)
    file.write_text("good-1.example slots=2\n10.0.0.1 slots=1\nfe80::1 slots=1\n")
    assert len(read_hostfile(file)) == 3


def test_a_saved_config_does_not_choose_the_default_port() -> None:
    """Two runs that are started from resolved configs would meet at one port."""
    saved = NeoXArgs.from_dict(config(num_gpus=2).to_dict())
    assert saved.to_dict()["master_port"] == 29500
    plan = plan_launch(["train.py"], saved, {"DS_ACCELERATOR": "cpu"})
    assert runner_options(plan.runner_arguments).master_port != 29500


def test_over_pdsh_a_signal_goes_to_the_rank_that_holds_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {tmp_path}/said\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(psutil.Process, "children", lambda _: [])  # pdsh, which would be ended
    (tmp_path / ".lock.owner").write_text('{"host": "node-2", "process": 4711}')
    launcher._signal_owner(str(tmp_path), signal.SIGINT)
    *_, host, command = (tmp_path / "said").read_text().splitlines()
    assert host == "node-2" and command.endswith(
        "-p 4711 | grep -q megatron_config && kill -2 4711"
    )
    (tmp_path / "said").unlink()
    (tmp_path / ".lock.owner").write_text('{"host": "-oProxyCommand=x", "process": 4711}')
    launcher._signal_owner(str(tmp_path), signal.SIGINT)
    assert not (tmp_path / "said").exists()
