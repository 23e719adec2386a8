"""Saving a run through DeepSpeed: all ranks write, one makes it visible."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from megatron.atomic_files import write_text
from megatron.checkpoints.resuming import rng_file, rng_state, write_layout
from megatron.checkpoints.safe_files import SafeCheckpointEngine
from megatron.checkpoints.saved_config import RESOLVED
from megatron.checkpoints.store import CheckpointStore, Sums, checksum, tag_of
from megatron.errors import CheckpointError

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

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
        files: SafeCheckpointEngine = engine.checkpoint_engine
        files.begin()
        _hand_over(engine, store, args, step, progress)
        return _written(files, store, step)

    keep = args.checkpoint.keep_last_n_checkpoints
    publish(store, step, write, _doing(store, step), ADVICE, prove=bool(keep))
    _prune(store, keep)
    return store.path(step)


def _doing(store: CheckpointStore, step: int) -> str:
    return f"writing checkpoint {tag_of(step)} to {store.directory}"


def _prune(store: CheckpointStore, keep: int | None) -> None:
    if _is_main():  # only now that the newer one is complete, and proven
        store.prune(keep)
    dist.barrier()


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
    with _leaving_nothing(store, step):
        _prepare(store, step, doing, advice)
        _complete(store, step, write, doing, advice, prove=prove)


def _prepare(store: CheckpointStore, step: int, doing: str, advice: str) -> None:
    together(lambda: store.prepare(step) if _is_main() else None, doing, advice)


def _complete(
    store: CheckpointStore,
    step: int,
    write: Callable[[], Sums],
    doing: str,
    advice: str,
    *,
    prove: bool,
) -> None:
    shares = together(write, doing, advice)
    if prove:
        own = shares[dist.get_rank()]
        together(lambda: _prove(store.staging / tag_of(step), own), doing, advice)
    sums = {name: entry for share in shares for name, entry in share.items()}
    together(lambda: store.commit(step, sums) if _is_main() else None, doing, advice)


@contextmanager
def _leaving_nothing(store: CheckpointStore, step: int) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        if _is_main():
            store.discard(step)
        raise


def _is_main() -> bool:
    return dist.get_rank() == 0


class BackgroundSave:
    """`async_save`: a checkpoint that a thread of each rank writes while training goes on.

    Making it takes the copies; all ranks make it, and later `complete` it, after the same steps.
    Until then it is not a checkpoint: whatever ends the run leaves the older one.
    """

    def __init__(
        self,
        engine: Any,
        store: CheckpointStore,
        args: NeoXArgs,
        step: int,
        progress: dict[str, int],
    ) -> None:
        self.store, self.step = store, step
        self._keep = args.checkpoint.keep_last_n_checkpoints
        self._files: SafeCheckpointEngine = engine.checkpoint_engine
        self._sums: Sums = {}
        self._problem: Exception | None = None
        self._abandoned = False
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)

        def take() -> None:
            self._files.begin(later=True)
            _hand_over(engine, store, args, step, progress)
            self._files.finish()

        doing = _doing(store, step)
        with _leaving_nothing(store, step):
            _prepare(store, step, doing, ADVICE)
            together(take, doing, ADVICE)
        self._thread.start()

    @property
    def is_written(self) -> bool:
        """Whether this rank has nothing left to write."""
        return not self._thread.is_alive()

    def complete(self) -> Path:
        """Wait for all ranks, then make the checkpoint visible and delete older ones."""
        doing = _doing(self.store, self.step)
        with _leaving_nothing(self.store, self.step):
            _complete(self.store, self.step, self._share, doing, ADVICE, prove=False)
        _prune(self.store, self._keep)
        return self.store.path(self.step)

    def abandon(self) -> None:
        """Stop writing; what is there is removed when the run is started again."""
        self._abandoned = True
        self._thread.join()

    def _write(self) -> None:
        try:
            self._files.write_kept(lambda: not self._abandoned)
            self._sums = _written(self._files, self.store, self.step)
            if self._keep:
                _prove(self.store.staging / tag_of(self.step), self._sums)
        except Exception as error:  # for the step that comes to `complete`
            self._problem = error

    def _share(self) -> Sums:
        self._thread.join()
        if self._problem is not None:
            raise self._problem
        return self._sums


def _prove(staged: Path, sums: Sums) -> None:
    for name, (_, expected) in sums.items():
        if checksum(staged / name) != expected:
            raise CheckpointError(f"{name} reads back differently from what was written")


def _hand_over(
    engine: Any, store: CheckpointStore, args: NeoXArgs, step: int, progress: dict[str, int]
) -> None:
    """This rank's files: DeepSpeed's, the random states, and (on rank 0) the config."""
    tag = tag_of(step)
    staged = store.staging / tag
    engine.save_checkpoint(
        str(store.staging), tag=tag, client_state=dict(progress), save_latest=False
    )
    if not args.checkpoint.no_save_rng:
        engine.checkpoint_engine.save(rng_state(), str(rng_file(staged)))
    if _is_main():
        write_configs(staged / "configs", args)
        write_layout(staged, args)


def _written(files: SafeCheckpointEngine, store: CheckpointStore, step: int) -> Sums:
    files.finish()
    return files.sums(store.staging / tag_of(step))


def write_configs(directory: Path, args: NeoXArgs) -> None:
    """The user's files as they are, and what they came to."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in args.sources.items():
        write_text(directory / Path(name).name, text)
    write_text(directory / RESOLVED, args.to_yaml())
