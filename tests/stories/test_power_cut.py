"""The power fails at any moment: the run resumes, the prepared or converted file is whole.

Each case is recorded once, then every state that the disk may be in is built and looked at
(`tests/crash_disk.py`). Then each place that calls fsync is left out in turn: a state must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron.atomic_files import check_folder_writable
from megatron.checkpoints.reading import read_checkpoint
from megatron.checkpoints.safe_files import TrainingFiles, load_file
from megatron.checkpoints.saving import Save
from megatron.checkpoints.store import CheckpointStore
from megatron.commands import run as command_run
from megatron.data import IndexedDataset
from megatron.data.indexed_dataset import idx_path
from tests.checkpoints.conftest import one_process  # noqa: F401
from tests.checkpoints.small_models import saved_model
from tests.crash_disk import Recorder, recording, replay, sites
from tests.data.samples import write


@dataclass(frozen=True)
class Case:
    begin: Callable[[Path], None]
    """What is there before."""
    act: Callable[[Path, Recorder], None]
    check: Callable[[Path, list[str]], None]
    """Raises if the state is not good; the marks are what was promised."""
    needless: frozenset[str] = frozenset()
    """Places whose fsync another one repeats: without them alone, nothing is lost."""


# Saving and pruning.


def save(store: CheckpointStore, step: int, keep: int, *, background: bool = False) -> None:
    files = TrainingFiles()
    staged = store.staging / f"global_step{step}"

    def hand_over() -> None:
        for name in ("states.pt", "zero/0/fp32.pt"):
            files.makedirs(str((staged / name).parent), exist_ok=True)
            files.save({"step": torch.full((2,), float(step))}, str(staged / name))

    Save(files, store, step, hand_over, background=background, keep=keep).complete()


def save_three(folder: Path, recorder: Recorder, keeps: tuple[int, ...] = (2, 2, 2)) -> None:
    check_folder_writable(folder / "new" / "run", "save =")  # as a training begins
    store = CheckpointStore(folder / "new" / "run")
    for step, keep in enumerate(keeps, start=1):
        save(store, step, keep, background=step % 2 == 0)
        recorder.mark(str(step))


def save_again(folder: Path, recorder: Recorder) -> None:
    save(CheckpointStore(folder / "new" / "run"), 2, keep=2)
    recorder.mark("2")


def two_saved(folder: Path) -> None:
    for step in (1, 2):
        save(CheckpointStore(folder / "new" / "run"), step, keep=2)


def resumes(folder: Path, marks: list[str], before: int = 0) -> None:
    """As a start does: clean, take the newest, compare with the checksums, load."""
    store = CheckpointStore(folder / "new" / "run")
    store.clean()
    promised = max((int(mark) for mark in marks if mark.isdigit()), default=before)
    newest = store.newest()
    assert (newest or 0) >= promised, f"step {promised} was saved, {newest} is found"
    for step in store.steps():
        assert store.verify(step)
        for name in ("states.pt", "zero/0/fp32.pt"):
            assert load_file(store.path(step) / name)["step"].tolist() == [step] * 2


# Preparing data.

OLD, NEW = [[1, 2, 3], [4]], [[9, 8], [7, 6, 5, 4, 3, 2]]


def old_data(folder: Path) -> None:
    write(folder / "new" / "text_document", OLD)


def prepare(folder: Path, recorder: Recorder) -> None:
    write(folder / "new" / "text_document", NEW)
    recorder.mark("prepared")


def data_is_whole(folder: Path, marks: list[str]) -> None:
    prefix = folder / "new" / "text_document"
    if not idx_path(prefix).exists():
        assert not marks
        return
    data = IndexedDataset(prefix)
    found = [data[i].tolist() for i in range(len(data))]
    assert found == NEW or (found == OLD and not marks), found


# Converting.


SYNCED_BEFORE = frozenset({"atomic_writer < close"})  # `close` syncs the index itself, before


def old_conversion(folder: Path) -> None:
    saved_model(folder / "source", num_layers=1, hidden_size=8, num_attention_heads=2)
    convert(folder)


def convert(folder: Path, recorder: Recorder | None = None) -> None:
    arguments = [str(folder / "source"), str(folder / "out"), "--to", "native", "--overwrite"]
    assert command_run("convert_checkpoint", arguments) == 0
    if recorder is not None:
        recorder.mark("converted")


def conversion_is_whole(folder: Path, marks: list[str]) -> None:
    if not (folder / "out").exists():
        assert not marks
        return
    assert CheckpointStore(folder / "out").verify(5)
    assert read_checkpoint(folder / "out").weights


def nothing(folder: Path) -> None:
    """The disk is empty before."""


CASES = {
    "save, save in the background, prune": Case(nothing, save_three, resumes),
    "save a step again": Case(
        two_saved,
        save_again,
        lambda folder, marks: resumes(folder, marks, before=1),
        # The name of the older one is synced by `commit` before anything is deleted, and `latest`
        # has the same content before and after.
        frozenset({"sync_directory < _set_aside", "sync_directory < publish"}),
    ),
    "prepare data": Case(nothing, prepare, data_is_whole, SYNCED_BEFORE),
    "prepare data again": Case(old_data, prepare, data_is_whole, SYNCED_BEFORE),
    "convert again": Case(
        old_conversion,
        convert,
        conversion_is_whole,
        # `_sync_tree` syncs them all once more.
        frozenset(
            {
                "synced_save < _write_shards",
                "atomic_writer < write_text",
                "sync_directory < publish",
            }
        ),
    ),
    "save eight": Case(
        nothing, lambda folder, log: save_three(folder, log, (1, 3, 2, 1, 1, 2, 3, 1)), resumes
    ),
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if "eight" in name else ()) for name in CASES],
)
def test_every_cut_leaves_something_whole(tmp_path: Path, name: str) -> None:
    case, disk = CASES[name], tmp_path / "disk"
    disk.mkdir()
    case.begin(disk)
    with recording(disk) as recorder:
        case.act(disk, recorder)
    count, problem = replay(recorder, tmp_path / "after", case.check)
    assert not problem
    assert count > 10
    needless = {
        site
        for site in sites(recorder)
        if not replay(recorder, tmp_path / "after", case.check, without=site)[1]
    }
    assert needless == case.needless
