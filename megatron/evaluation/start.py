"""Joining the other processes, and the device to compute on."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.evaluation.ranks import Ranks

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

__all__ = ["join_ranks", "pick_device"]


def join_ranks(args: NeoXArgs, local_rank: int | None = None) -> tuple[Ranks, str]:
    """This process among the job's, and its device.

    Every process holds the whole model and takes a share of the sequences; they exchange results
    only, which gloo does on any machine.
    """
    from megatron.neox_arguments.environment import environment_for

    environment = environment_for(args.launcher, local_rank)
    if environment.world_size > 1 and not dist.is_initialized():
        dist.init_process_group(
            "gloo", timeout=timedelta(minutes=args.runtime.distributed_timeout_minutes)
        )
    return Ranks.current(), pick_device(environment.local_rank)


def pick_device(local_rank: int = 0) -> str:
    """This process's accelerator if the machine has any (and DS_ACCELERATOR does not forbid it)."""
    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would search, and say so
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return "cpu"
    kind = torch.accelerator.current_accelerator()
    count = max(1, torch.accelerator.device_count())
    return f"{kind.type if kind else 'cpu'}:{local_rank % count}"
