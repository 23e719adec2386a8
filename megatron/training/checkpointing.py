"""Saving and resuming a run through DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron.mpu import ParallelState
from megatron.training.checkpoint_store import CheckpointStore, tag_of
from megatron.training.rng import rng_state, set_rng_state
from megatron.training.safe_files import CheckpointError, safe_load, synced_save

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs


@dataclass(frozen=True)
class Resumed:
    """Where a run continues."""

    step: int
    consumed_samples: int


def _failed_anywhere(error: BaseException | None) -> bool:
    """Whether any rank failed; all ranks must ask."""
    flag = torch.tensor([0.0 if error is None else 1.0])
    if dist.get_backend() == "nccl":
        flag = flag.cuda()
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def save_checkpoint(
    engine: Any, store: CheckpointStore, args: NeoXArgs, step: int, consumed_samples: int
) -> Path:
    """Write checkpoint `step` on all ranks; it becomes visible only when it is complete."""
    main = dist.get_rank() == 0
    if main:
        store.prepare(step)
    dist.barrier()
    error: Exception | None = None
    try:
        _write_share(engine, store, args, step, consumed_samples)
    except (OSError, RuntimeError) as caught:
        error = caught
    if _failed_anywhere(error):
        if main:
            store.discard(step)
        raise CheckpointError(
            f"checkpoint {tag_of(step)} could not be written to {store.directory} "
            f"({error or 'another rank failed'}). Earlier checkpoints are untouched; "
            "free disk space or set `save` to another directory, then resume."
        ) from error
    if main:
        store.commit(step)
        store.prune(args.checkpoint.keep_last_n_checkpoints)
    dist.barrier()
    return store.path(step)


def _write_share(
    engine: Any, store: CheckpointStore, args: NeoXArgs, step: int, consumed_samples: int
) -> None:
    """This rank's files: DeepSpeed's, the random states, and (on rank 0) the config."""
    staging, tag = store.staging, tag_of(step)
    client_state = {"iteration": step, "consumed_samples": consumed_samples}
    engine.save_checkpoint(str(staging), tag=tag, client_state=client_state, save_latest=False)
    rank = dist.get_rank()
    if not args.checkpoint.no_save_rng:
        synced_save(rng_state(), staging / tag / f"rng_rank_{rank:05d}.pt")
    if rank == 0:
        _write_configs(staging / tag / "configs", args)


def _write_configs(directory: Path, args: NeoXArgs) -> None:
    directory.mkdir(exist_ok=True)
    for name, text in args.sources.items():
        (directory / Path(name).name).write_text(text, encoding="utf-8")
    (directory / "resolved.yml").write_text(args.to_yaml(), encoding="utf-8")


def find_checkpoint(store: CheckpointStore, iteration: int | None) -> int | None:
    """The step to load: the one asked for, else the newest; None if there is nothing yet."""
    if iteration is None:
        return store.newest()
    if not store.path(iteration).is_dir():
        there = ", ".join(map(str, store.steps())) or "none"
        raise CheckpointError(
            f"iteration = {iteration}: {store.path(iteration)} does not exist; "
            f"complete checkpoints: {there}"
        )
    return iteration


def resume(
    engine: Any,
    store: CheckpointStore,
    args: NeoXArgs,
    step: int,
    parallel: ParallelState,
) -> Resumed:
    """Load weights, optimizer, schedule and random states; the data position follows from them."""
    _verify_together(store, step)
    options = args.checkpoint
    fresh = options.finetune
    _, client_state = engine.load_checkpoint(
        str(store.directory),
        tag=tag_of(step),
        load_optimizer_states=not (options.no_load_optim or fresh),
        load_lr_scheduler_states=not (args.optimization.override_lr_scheduler or fresh),
    )
    if client_state is None:
        raise CheckpointError(f"{store.path(step)}: DeepSpeed found no model state in it")
    if fresh:
        return Resumed(0, 0)
    if not options.no_load_rng:
        _load_rng(store.path(step) / f"rng_rank_{dist.get_rank():05d}.pt")
    return Resumed(int(client_state["iteration"]), int(client_state["consumed_samples"]))


def _verify_together(store: CheckpointStore, step: int) -> None:
    """Rank 0 reads the checksums; every rank learns of damage."""
    message: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            store.verify(step)
        except CheckpointError as error:
            message = [str(error)]
    dist.broadcast_object_list(message, src=0)
    if message[0] is not None:
        raise CheckpointError(message[0])


def _load_rng(path: Path) -> None:
    """Missing files mean that the number of ranks changed: the fresh seeds stay."""
    if path.is_file():
        set_rng_state(safe_load(path))
