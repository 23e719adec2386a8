"""Saving a run through DeepSpeed: all ranks write, one makes it visible."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from megatron.atomic_files import write_text
from megatron.checkpoints.checksums import Sums, checksum
from megatron.checkpoints.random_states import rng_file, rng_state
from megatron.checkpoints.rank_layout import write_layout
from megatron.checkpoints.safe_files import SafeCheckpointEngine
from megatron.checkpoints.saved_config import RESOLVED
from megatron.checkpoints.store import CheckpointStore, tag_of
from megatron.errors import CheckpointError

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

__all__ = ["publish", "save_checkpoint", "together", "write_configs"]

T = TypeVar("T")
ADVICE = (
    "Earlier checkpoints are untouched: free disk space or set `save` to another directory, then "
    "resume."
)


def together(action: Callable[[], T], doing: str, advice: str) -> list[T]:
    """Run `action` on every rank; the results of all.

    If it fails on some, all raise the same error, and none waits.
    """
    problem: str | None = None
    cause: Exception | None = None
    result: T | None = None
    try:
        result = action()
    except (OSError, RuntimeError, CheckpointError) as error:
        problem, cause = f"{type(error).__name__}: {error}", error
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (problem, result))
    failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text is not None]
    if failed:
        raise CheckpointError(f"{doing} failed ({'; '.join(failed)}). {advice}") from cause
    return [value for _, value in answers]


def save_checkpoint(
    engine: Any, store: CheckpointStore, args: NeoXArgs, step: int, progress: dict[str, int]
) -> Path:
    """Write checkpoint `step` on all ranks; it becomes visible only when it is complete."""

    def write() -> Sums:
        return _write_share(engine, store, args, step, progress)

    keep = args.checkpoint.keep_last_n_checkpoints
    doing = f"writing checkpoint {tag_of(step)} to {store.directory}"
    publish(store, step, write, doing, ADVICE, prove=bool(keep))
    if dist.get_rank() == 0:  # only now that the newer one is complete, and proven
        store.prune(keep)
    dist.barrier()
    return store.path(step)


def publish(
    store: CheckpointStore,
    step: int,
    write: Callable[[], Sums],
    doing: str,
    advice: str,
    *,
    prove: bool = False,
) -> None:
    """All ranks write their shares, which appear as one checkpoint; a failure leaves nothing.

    `prove`: read everything back before it counts, because an older one will be deleted for it.
    """
    main, staged = dist.get_rank() == 0, store.staging / tag_of(step)
    try:
        together(lambda: store.prepare(step) if main else None, doing, advice)
        shares = together(write, doing, advice)
        if prove:
            own = shares[dist.get_rank()]
            together(lambda: _prove(staged, own), doing, advice)
        sums = {name: entry for share in shares for name, entry in share.items()}
        together(lambda: store.commit(step, sums) if main else None, doing, advice)
    except CheckpointError:
        if main:
            store.discard(step)
        raise


def _prove(staged: Path, sums: Sums) -> None:
    for name, (_, expected) in sums.items():
        if checksum(staged / name) != expected:
            raise CheckpointError(f"{name} reads back differently from what was written")


def _write_share(
    engine: Any, store: CheckpointStore, args: NeoXArgs, step: int, progress: dict[str, int]
) -> Sums:
    """This rank's files: DeepSpeed's, the random states, and (on rank 0) the config."""
    tag = tag_of(step)
    staged = store.staging / tag
    files: SafeCheckpointEngine = engine.checkpoint_engine
    files.begin()
    engine.save_checkpoint(
        str(store.staging), tag=tag, client_state=dict(progress), save_latest=False
    )
    if not args.checkpoint.no_save_rng:
        files.save(rng_state(), str(rng_file(staged)))
    if dist.get_rank() == 0:
        write_configs(staged / "configs", args)
        write_layout(staged, args)
    files.finish()
    return files.sums(staged)


def write_configs(directory: Path, args: NeoXArgs) -> None:
    """The user's files as they are, and what they came to."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in args.sources.items():
        write_text(directory / Path(name).name, text)
    write_text(directory / RESOLVED, args.to_yaml())
