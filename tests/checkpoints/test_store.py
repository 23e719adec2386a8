"""Complete or invisible: the store under crashes at every operation, damage and pruning."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoints.store import CheckpointStore, ChecksummedFile, checksum, write_checksums
from megatron.errors import CheckpointError


class Crash(BaseException):
    """The process is gone: no handler may run."""


def save(store: CheckpointStore, step: int, keep: int | None = None) -> None:
    """What a Save does with the store."""
    store.prepare(step)
    for name in ("mp_rank_00_model_states.pt", "configs/resolved.yml"):
        file = store.staging / f"global_step{step}" / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(f"{name} of step {step}".encode() * 100)
    store.commit(step)
    store.prune(keep)


@pytest.fixture
def crash_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[str]]]:
    """Count the operations that change the disk; before number n, crash."""
    log: list[str] = []
    limit = [-1]

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def step(*args: Any, **kwargs: Any) -> Any:
            if len(log) == limit[0]:
                raise Crash
            log.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, step)

    for owner, name in (
        (Path, "rename"),
        (Path, "replace"),
        (Path, "mkdir"),
        (Path, "write_bytes"),
        (shutil, "rmtree"),
        (os, "fsync"),
    ):
        watch(owner, name)

    def arm(number: int) -> list[str]:
        log.clear()
        limit[0] = number
        return log

    yield arm


def test_a_crash_before_any_operation_leaves_a_good_checkpoint(
    tmp_path: Path, crash_at: Callable[[int], list[str]]
) -> None:
    log = crash_at(-1)
    save(CheckpointStore(tmp_path / "probe"), 10, keep=1)
    save(CheckpointStore(tmp_path / "probe"), 20, keep=1)
    operations = len(log)
    assert operations > 20
    for number in range(operations):
        store = CheckpointStore(tmp_path / f"run{number}")
        crash_at(number)
        try:
            save(store, 10, keep=1)
            save(store, 20, keep=1)
        except Crash:
            pass
        crash_at(-1)
        newest = store.newest()
        if newest is not None:
            store.verify(newest)
        assert newest is not None or 20 not in store.steps()
        store.clean()
        save(store, 30, keep=1)
        assert store.newest() == 30
        assert sorted(p.name for p in store.directory.iterdir() if p.name[0] == ".") in (
            [],
            [".incomplete"],
        )


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 10)
    (store.path(10) / "old").write_text("x")
    save(store, 10)
    assert not (store.path(10) / "old").exists()
    store.verify(10)


def test_pruning_never_takes_the_newest_written(tmp_path: Path) -> None:
    """After going back to step 20, the checkpoint of step 30 is newer than that of step 40."""
    store = CheckpointStore(tmp_path)
    for step in (20, 40, 30):
        save(store, step)
    assert store.newest() == 30
    assert store.prune(1) == [20, 40]
    assert store.steps() == [30]
    assert store.prune(None) == []


def _truncate(root: Path) -> None:
    file = root / "mp_rank_00_model_states.pt"
    file.write_bytes(file.read_bytes()[:-7])


def _flip(root: Path) -> None:
    file = root / "mp_rank_00_model_states.pt"
    content = bytearray(file.read_bytes())
    content[50] ^= 1
    file.write_bytes(content)


def _remove(root: Path) -> None:
    (root / "mp_rank_00_model_states.pt").unlink()


def _break_sums(root: Path) -> None:
    (root / "checksums.json").write_text('{"mp_rank_00_model')


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_truncate, "bytes instead of"),
        (_flip, "does not match its checksum"),
        (_remove, "mp_rank_00_model_states.pt is missing"),
        (_break_sums, "checksums.json is not readable"),
    ],
)
def test_damage_is_named_and_the_previous_offered(
    tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    store = CheckpointStore(tmp_path)
    for step in (10, 20, 30):
        save(store, step)
    damage(store.path(30))
    with pytest.raises(CheckpointError, match=words) as caught:
        store.verify(30)
    assert "global_step30" in str(caught.value)
    assert "--set iteration=20" in str(caught.value)
    damage(store.path(20))
    with pytest.raises(CheckpointError, match="iteration=10"):
        store.verify(30)


def test_an_earlier_checkpoint_is_offered_rather_than_a_later(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (10, 20, 30):
        save(store, step)
    _remove(store.path(20))
    with pytest.raises(CheckpointError, match="before it is global_step10"):
        store.verify(20)
    _remove(store.path(10))
    with pytest.raises(CheckpointError, match="newest complete checkpoint is global_step30"):
        store.verify(10)


def test_a_missing_iteration_lists_those_there(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 10)
    with pytest.raises(CheckpointError, match=r"iteration = 15.*complete checkpoints: 10"):
        store.find(15)


@pytest.mark.parametrize("content", [b"global_step99", b"\xff\xfe\x00", b"", b"../elsewhere"])
def test_latest_that_names_nothing_is_an_error_with_the_ways_out(
    tmp_path: Path, content: bytes
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 10)
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(CheckpointError, match="--iteration N"):
        store.newest()
    assert store.find(10) == 10
    (tmp_path / "latest").unlink()
    assert store.newest() == 10


@pytest.mark.parametrize(
    "content",
    ["", "{", "[" * 100_000, "[]", "{}", '{"a": 1}', '{"a": [[], {}]}', '{"../x": [1, "a"]}'],
    ids=["empty", "cut", "deep", "list", "none", "number", "lists", "outside"],
)
def test_checksums_that_say_nothing_are_damage(tmp_path: Path, content: str) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 10)
    (store.path(10) / "checksums.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"damaged: checksums\.json"):
        store.verify(10)


def test_a_training_checkpoint_without_checksums_is_damaged_and_never_foreign(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 10)
    (store.path(10) / "checksums.json").unlink()
    assert not store.verify(10)  # nothing says that we trained it
    (store.path(10) / "layout.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"checksums\.json is missing"):
        store.verify(10)


def test_a_kill_between_two_renames_loses_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 5 is written again: the old copy has been set aside, the new one has no name yet."""
    store = CheckpointStore(tmp_path)
    save(store, 5)
    before = (store.path(5) / "mp_rank_00_model_states.pt").read_bytes()
    real = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if self.parent == store.staging:
            raise Crash
        return real(self, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(Crash):
        save(store, 5)
    monkeypatch.setattr(Path, "rename", real)
    assert not store.path(5).exists()
    store.clean()
    assert store.newest() == 5 and store.verify(5)
    assert (store.path(5) / "mp_rank_00_model_states.pt").read_bytes() == before


def test_what_was_deleted_in_part_is_deleted(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 5)
    save(store, 6)
    half = tmp_path / ".deleted_global_step5"
    store.path(5).rename(half)
    (half / "mp_rank_00_model_states.pt").unlink()
    store.clean()
    assert store.steps() == [6] and not half.exists()


def test_cleaning_leaves_a_users_own_hidden_files(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for name in (".notes.tmp", ".x.tmp1", ".latest.77.0123abcd.tmp"):
        (tmp_path / name).touch()
    store.clean()
    assert {path.name for path in tmp_path.iterdir()} == {".notes.tmp", ".x.tmp1"}


def test_a_file_that_another_host_wrote_elsewhere_is_missed(tmp_path: Path) -> None:
    (tmp_path / "here.pt").write_bytes(b"abc")
    known = {"here.pt": (3, checksum(tmp_path / "here.pt")), "layer_01.pt": (5, "00000000")}
    with pytest.raises(CheckpointError, match=r"1 files .* not here \(layer_01.pt\).*shares"):
        write_checksums(tmp_path, known)
    assert not (tmp_path / "checksums.json").exists()


def test_a_file_is_summed_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as handle:
        summed = ChecksummedFile(handle)
        for part in (b"one", b"", b"two"):
            assert summed.write(part) == len(part)
    assert (
        (summed.size, summed.checksum) == (6, checksum(path)) == (6, f"{zlib.crc32(b'onetwo'):08x}")
    )
