"""A save is none until it is complete; that its content is right is held by test_resuming.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.checkpoints import saving
from megatron.checkpoints.safe_files import TrainingFiles, load_file
from megatron.checkpoints.saving import Save
from megatron.checkpoints.store import CheckpointStore
from megatron.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("one_process")


def begin(store: CheckpointStore, step: int, *, background: bool = False) -> Save:
    files = TrainingFiles()
    file = store.staging / f"global_step{step}" / "states.pt"
    state = {"x": torch.full((4,), float(step))}

    def hand_over() -> None:
        files.save(state, str(file))

    begun = Save(files, store, step, hand_over, background=background, keep=1)
    state["x"].zero_()  # as the steps after it would
    return begun


@pytest.mark.parametrize("background", [False, True])
def test_a_newer_checkpoint_replaces_the_older(tmp_path: Path, background: bool) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        assert begin(store, step, background=background).complete() == store.path(step)
    assert store.steps() == [2] and store.verify(2)
    assert load_file(store.path(2) / "states.pt")["x"].tolist() == [2.0] * 4


def test_what_reads_back_differently_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    begin(store, 1).complete()
    monkeypatch.setattr(saving, "checksum", lambda path: "0")
    with pytest.raises(CheckpointError, match=r"states\.pt reads back differently"):
        begin(store, 2).complete()
    assert store.newest() == 1 and store.steps() == [1] and store.verify(1)


def test_an_abandoned_save_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    begin(store, 1).complete()
    begin(store, 2, background=True).abandon()
    assert store.newest() == 1 and store.steps() == [1]
