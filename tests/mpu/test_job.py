"""Rank, device and port of every process, as Slurm, torchrun, pdsh and MPI start 2 x 8 GPUs.

No GPU is needed: what torch reports of the machine's devices is replaced, what the launchers set in
the environment is given as they set it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megatron.errors import ConfigError
from megatron.launcher.environment import environment_for
from megatron.mpu.job import device_index, pick_device
from megatron.neox_arguments.run_keys import LauncherArgs
from tests.processes import run_ranks

NODES, PER_NODE = 2, 8
WORLD = NODES * PER_NODE


def slurm_task(rank: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % PER_NODE),
        "SLURM_NTASKS": str(WORLD),
        "SLURM_STEP_NODELIST": "gpu[07-08]",
    }


def torchrun_worker(rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % PER_NODE),
        "WORLD_SIZE": str(WORLD),
        "LOCAL_WORLD_SIZE": str(PER_NODE),
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "29400",
        "TORCHELASTIC_RUN_ID": "x",
    }


def pdsh_worker(rank: int) -> dict[str, str]:
    """DeepSpeed's launcher, started on each node by pdsh, exports these to its children."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % PER_NODE),
        "WORLD_SIZE": str(WORLD),
        "LOCAL_SIZE": str(PER_NODE),
        "CROSS_RANK": str(rank // PER_NODE),
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "29500",
    }


def mpi_process(rank: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % PER_NODE),
        "OMPI_COMM_WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "29500",
    }


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine that shows this many CUDA devices; the chosen ones are appended."""
    chosen: list[int] = []
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    return chosen


@pytest.mark.parametrize("per_task", [1, PER_NODE])
@pytest.mark.parametrize("start", [slurm_task, torchrun_worker, pdsh_worker, mpi_process])
def test_every_process_of_two_nodes_finds_its_rank_and_device(
    start: object, per_task: int, visible: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: per_task)
    assert callable(start)
    places, ports = [], set()
    for rank in range(WORLD):
        found = environment_for(LauncherArgs(), environ=(environ := start(rank)))
        monkeypatch.setenv("LOCAL_RANK", environ["LOCAL_RANK"])
        device = pick_device(found.local_rank)
        assert found.master_addr == "gpu07"
        # DeepSpeed chooses the device again, by LOCAL_RANK.
        assert int(os.environ["LOCAL_RANK"]) == device.index == visible[-1]
        places.append((found.rank, found.world_size, device))
        ports.add(found.master_port)
    expected = [0] * PER_NODE if per_task == 1 else list(range(PER_NODE))
    assert places == [
        (rank, WORLD, torch.device("cuda", expected[rank % PER_NODE])) for rank in range(WORLD)
    ]
    assert len(ports) == 1


def test_more_processes_than_devices_is_said() -> None:
    assert device_index(3, 4) == 3
    with pytest.raises(ConfigError, match="process 5 of its node, but only 4 devices"):
        device_index(4, 4)


def test_a_forbidden_accelerator_is_not_used(
    visible: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert pick_device(3) == torch.device("cpu")
    assert visible == []


EVERY_GROUP = """
import torch
import torch.distributed as dist
from megatron.backends.deepspeed_processes import build_grid
from megatron.mpu.job import join_job
from megatron.neox_arguments import NeoXArgs
from tests.training.cases import tiny_config

join_job(NeoXArgs.from_dict(tiny_config("data", distributed_timeout_minutes=0.7)))
build_grid(pipe=2, model=1, data=1)
groups = list(dist.distributed_c10d._world.pg_map)
assert len(groups) > 2, groups
for group in groups:
    found = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    assert found == 42, (group.group_desc, found)
"""


def test_every_group_waits_as_long_as_configured_deepspeeds_too(tmp_path: Path) -> None:
    """DeepSpeed makes its groups without a timeout, which to torch means 30 minutes."""
    program = tmp_path / "groups.py"
    program.write_text(EVERY_GROUP)
    run_ranks([str(program)], 2)
