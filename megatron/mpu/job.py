"""The job: this process's device, its process groups, its seeds, and work shared by ranks."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from megatron.backends import TORCH, chosen_backend
from megatron.backends.deepspeed_processes import join_group
from megatron.errors import ConfigError, EvaluationError
from megatron.launcher.environment import (
    LOOPBACK,
    LOOPBACK_NAMES,
    DistributedEnvironment,
    environment_for,
    export_interface,
    spans_hosts,
)
from megatron.machine import set_deepspeed_accelerator
from megatron.mpu.collectives import ParallelState, gather_objects, initialize_parallel
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.run_keys import LauncherArgs


def device_index(local_rank: int, visible: int) -> int:
    """The index of this process's device among the visible ones.

    `srun --gpus-per-task=1` shows every task one device, which is number 0 to each of them;
    launchers and `--gpus-per-node` show all of the node's to every process.
    """
    if visible <= 1:
        return 0
    if local_rank >= visible:
        raise ConfigError(
            f"this is process {local_rank + 1} of its node, but only {visible} devices are visible "
            f"to it. Start at most {visible} processes a node, or give each its own device "
            "(srun --gpus-per-task=1)."
        )
    return local_rank


def pick_device(local_rank: int = 0) -> torch.device:
    """This process's accelerator if the machine has any (and DS_ACCELERATOR does not forbid it).

    LOCAL_RANK is set to its index, because DeepSpeed chooses the device by it again.
    """
    set_deepspeed_accelerator()
    kind = _accelerator()
    if kind is None:
        return torch.device("cpu")
    index = device_index(local_rank, torch.accelerator.device_count())
    os.environ["LOCAL_RANK"] = str(index)
    torch.accelerator.set_device_index(index)
    return torch.device(kind.type, index)


def current_device() -> torch.device:
    """The device that `pick_device` chose for this process."""
    kind = _accelerator()
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind.type, torch.accelerator.current_device_index())


def _accelerator() -> torch.device | None:
    """The machine's accelerator, unless it has none or DS_ACCELERATOR forbids it."""
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.accelerator.is_available():
        return None
    return torch.accelerator.current_accelerator()


def join_training(args: NeoXArgs) -> ParallelState:
    """Join the process group and build the parallel grid."""
    join_job(args)
    return initialize_parallel(
        args.parallel, serial=chosen_backend(args.runtime.training_backend) == TORCH
    )


def join_job(args: NeoXArgs) -> None:
    """Join the process group that the launcher's or Slurm's variables describe; once."""
    if dist.is_initialized():
        return
    environment = environment_for(args.launcher)
    on_cpu = pick_device(environment.local_rank).type == "cpu"
    backend = "gloo" if on_cpu else args.parallel.distributed_backend
    timeout = timedelta(minutes=args.runtime.distributed_timeout_minutes)
    plain = chosen_backend(args.runtime.training_backend) == TORCH
    if plain:
        check_plain_torch(args, environment.world_size)
        _init_process_group(environment, backend, timeout)
    else:
        _rendezvous_on_loopback(environment, backend, timeout)
        join_group(backend, timeout, on_cpu=on_cpu)


def check_plain_torch(args: NeoXArgs, world_size: int) -> None:
    """Refuse what `training_backend: torch` cannot do; a message if DeepSpeed is missing."""
    wanted = {
        f"{world_size} processes": world_size > 1,
        f"precision = {args.optimization.precision}": args.optimization.precision != "fp32",
        f"zero_optimization.stage = {args.optimization.zero_stage}": args.optimization.zero_stage,
        f"pipe_parallel_size = {args.parallel.pipe_parallel_size}": (
            args.parallel.pipe_parallel_size
        ),
        f"optimizer.type = {args.optimization.optimizer.type}": (
            args.optimization.optimizer.type in ("fused_adam", "cpu_adam")
        ),
    }
    reason = "training_backend = torch" if args.runtime.training_backend else "no DeepSpeed here"
    if needed := [text for text, used in wanted.items() if used]:
        raise ConfigError(
            f"{', '.join(needed)}: needs DeepSpeed ({reason}). Install deepspeed and leave "
            "training_backend out, or train in one process in fp32 without ZeRO and pipeline."
        )
    if args.runtime.training_backend is None:
        print("DeepSpeed is not installed: training with torch alone", flush=True)


def _init_process_group(
    environment: DistributedEnvironment, backend: str, timeout: timedelta
) -> None:
    _rendezvous_on_loopback(environment, backend, timeout)
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timeout)


def _rendezvous_on_loopback(
    environment: DistributedEnvironment, backend: str, timeout: timedelta
) -> None:
    """Rendezvous of a job on one machine, on the loopback interface only.

    Torch's own rendezvous listens on all interfaces, and any client may write to its store.
    """
    if environment.master_addr not in LOOPBACK_NAMES:
        if spans_hosts(os.environ):
            export_interface(environment.master_addr)
        return
    for loopback in {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    dist.init_process_group(
        backend,
        store=_loopback_store(environment, timeout),
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timeout,
    )


def _loopback_store(environment: DistributedEnvironment, timeout: timedelta) -> dist.Store:
    """A store inside this process, or a TCP store that listens on loopback."""
    if environment.world_size == 1:
        return dist.HashStore()
    options: dict[str, Any] = {"world_size": environment.world_size, "timeout": timeout}
    if environment.rank == 0:
        listener = socket.create_server((LOOPBACK, environment.master_port), backlog=4096)
        options |= {"is_master": True, "master_listen_fd": listener.detach()}
    return dist.TCPStore(LOOPBACK, environment.master_port, **options)


def join_evaluation(
    launcher: LauncherArgs, minutes: float, local_rank: int | None = None
) -> tuple[Ranks, str]:
    """The ranks of an evaluation, and this process's device.

    Every process holds the whole model and takes a share of the sequences; they exchange results
    only, which gloo does on any machine; none waits longer than `minutes` for another.
    """
    environment = environment_for(launcher, local_rank)
    device = pick_device(environment.local_rank)
    if environment.world_size > 1 and not dist.is_initialized():
        _init_process_group(environment, "gloo", timedelta(minutes=minutes))
    return Ranks.current(), str(device)


def set_seeds(seed: int, parallel: ParallelState) -> None:
    """Seed dropout: the same seed on tensor-parallel ranks, different seeds on all others."""
    own = seed + 7919 * parallel.dp_rank + 104729 * parallel.pp_rank
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)


# Work shared by ranks: each takes every n-th item, and the results are all-gathered.

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """This process among those that evaluate together."""

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> Ranks:
        """All processes of the default group; one process where there is none."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def broadcast(self, value: Result | None) -> Result:
        """The main process's value."""
        if self.size == 1:
            return cast(Result, value)
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return cast(Result, values[0])

    def map(
        self, function: Callable[[Sequence[Item]], Sequence[Result]], items: Sequence[Item]
    ) -> list[Result]:
        """`function` on this rank's share; all results in the order of `items`.

        A ValueError on any rank is raised on all of them, so that no rank waits for one that has
        stopped.
        """
        if self.size == 1:
            return list(function(items))
        share: tuple[list[Result] | None, str | None]
        try:
            share = (list(function(items[self.rank :: self.size])), None)
        except ValueError as error:
            share = (None, str(error))
        shares = gather_objects(share)
        for _, message in shares:
            if message is not None:
                raise EvaluationError(message)
        merged: list[Any] = [None] * len(items)
        for rank, (results, _) in enumerate(shares):
            merged[rank :: self.size] = results or []
        return merged
