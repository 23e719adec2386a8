"""The outermost layer of train.py: errors that a user can mend come without a traceback."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron.training.run import train

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs


def run_and_report(args: NeoXArgs) -> int:
    """Train; 0 when finished, 2 for mistakes in config, data or checkpoints."""
    try:
        code = train(args)
    except ValueError as error:
        # Config, data, tokenizer, checkpoint and engine errors are all ValueErrors of ours.
        if not type(error).__module__.startswith("megatron."):
            raise
        rank = dist.get_rank() if dist.is_initialized() else 0
        print(f"error (rank {rank}): {error}", file=sys.stderr, flush=True)
        return 2
    if dist.is_initialized():  # after an error, peers may be gone: leave without a farewell
        dist.destroy_process_group()
    return code
