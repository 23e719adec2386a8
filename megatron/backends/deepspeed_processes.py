"""DeepSpeed outside the engine: its runner, its process groups, its config keys and classes.

DeepSpeed and torch take seconds to import, so each function imports what it needs.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

RUNNER = "deepspeed.launcher.runner"


# The runner.


def selected_slots(slots: Mapping[str, int], include: str, exclude: str) -> int:
    """How many slots of the hosts `include` and `exclude` leave; ValueError if they are wrong."""
    from deepspeed.launcher.runner import parse_inclusion_exclusion

    active = parse_inclusion_exclusion(dict(slots), include, exclude)
    return sum(len(devices) for devices in active.values())


def run_runner(arguments: Sequence[str]) -> None:
    """DeepSpeed's runner in this process; it raises SystemExit with the job's code."""
    from deepspeed.launcher import runner

    base: Any = runner.PDSHRunner

    class Pdsh(base):
        """Passes the log level on: its launchers print every command, config and all."""

        def get_cmd(self, environment: Any, resources: Any) -> Any:
            command, kill, environment = super().get_cmd(environment, resources)
            place = command.index("deepspeed.launcher.launch") + 1
            command.insert(place, f"--log_level={self.args.log_level}")
            return command, kill, environment

    runner.PDSHRunner = Pdsh
    # Over pdsh it would take SIGINT and SIGTERM from us, and end the ranks before they have saved.
    runner.signal = SimpleNamespace(SIGINT=None, SIGTERM=None, signal=lambda *_: None)
    runner.main(list(arguments))


# Process groups.


def join_group(backend: str, timeout: timedelta, *, on_cpu: bool) -> None:
    """Join the process group that the environment names; DeepSpeed reuses an existing one."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    if on_cpu:
        # DeepSpeed compiles shared-memory collectives at the first start on a CPU. That takes a
        # minute and a compiler; gloo does the same work without either.
        # By name: `deepspeed.comm.torch` as an attribute is PyTorch itself.
        compiled: Any = importlib.import_module("deepspeed.comm.torch")
        compiled.build_shm_op = lambda: None
        # DeepSpeed requires fp16 instructions; PyTorch computes fp16 without them, only slower.
        get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(
        dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=timeout
    )
    # Its groups would have torch's own timeout of 30 minutes.
    comm: Any = importlib.import_module("deepspeed.comm.comm")
    comm.cdb.new_group = partial(torch.distributed.new_group, timeout=timeout)


def build_grid(*, pipe: int, model: int, data: int) -> Any:
    """The pipeline x data x tensor grid and its groups, tensor-parallel ranks adjacent."""
    from deepspeed.runtime.pipe.topology import (
        PipelineParallelGrid,
        PipeModelDataParallelTopology,
    )

    topology = PipeModelDataParallelTopology(num_pp=pipe, num_mp=model, num_dp=data)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the whole grid
        return PipelineParallelGrid(topology=topology)


def sequence_group(grid: Any, size: int) -> Any:
    """This rank's group among each `size` neighbours on the grid's data axis; None for one rank."""
    from deepspeed import comm

    if size == 1:
        return None
    own = None
    for replicas in grid.topology().get_axis_comm_lists("data") or [[0]]:
        for first in range(0, len(replicas), size):
            ranks = replicas[first : first + size]
            group = comm.new_group(ranks)  # every rank makes every group
            own = group if comm.get_rank() in ranks else own
    return own


# Config keys, classes and versions.


def zero_keys() -> list[str]:
    """Every key of `zero_optimization` that the installed DeepSpeed accepts."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields: Any = DeepSpeedZeroConfig.model_fields
    return [*fields, *(field.alias for field in fields.values() if field.alias)]


def state_classes() -> list[Any]:
    """Plain classes that DeepSpeed pickles in its training states: loss scalers, options."""
    from deepspeed.checkpoint.universal_checkpoint import SubparamShape
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address, SubparamShape]


def uneven_parts(shape: tuple[Any, ...]) -> Any:
    """How a tensor of several unequal parts is cut, for DeepSpeed's universal loader."""
    if not find_spec("deepspeed"):
        return None
    from deepspeed.checkpoint.universal_checkpoint import SubparamShape

    return SubparamShape(patterns=[], shape=shape, partition_dim=0)


def version() -> str:
    """The installed DeepSpeed's; "none" without one."""
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return "none"


def compiled_adam(kind: str, groups: list[dict[str, Any]], **options: Any) -> Any:
    """DeepSpeed's own Adam, `cpu_adam` or `fused_adam`: compiled at first use, some minutes."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    if kind == "cpu_adam":
        return DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
    return FusedAdam(groups, adam_w_mode=True, **options)
