"""Files and folders that are complete or absent."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megatron import atomic_files
from megatron.atomic_files import (
    atomic_writer,
    check_folder_writable,
    check_writable,
    new_directory,
    publish,
    read_json,
    remove_leftovers,
    sync_directory,
    temporary_name,
    write_json,
    write_text,
)
from megatron.errors import OutputError


def test_outputs_are_tried_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match=r"^--out .*file/deep/x: cannot be written \(Not a direc"):
        check_writable(tmp_path / "file" / "deep" / "x", "--out")
    with pytest.raises(OutputError, match="Is a directory"):
        check_writable(tmp_path, "--out")
    with pytest.raises(OutputError, match=r"--runs .*file: is a file, not a folder"):
        check_folder_writable(tmp_path / "file", "--runs")
    check_writable(tmp_path / "new" / "x", "--out")
    assert list((tmp_path / "new").iterdir()) == []


def test_an_error_while_writing_keeps_the_old_file_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    write_text(path, "old", parents=True)
    with pytest.raises(RuntimeError), atomic_writer(path) as handle:
        handle.write(b"half of the new")
        raise RuntimeError("interrupted")
    assert path.read_text() == "old" and list(path.parent.iterdir()) == [path]
    write_text(path, "new")
    assert path.read_text() == "new"


def test_a_folder_appears_whole_and_replaces_its_like_only(tmp_path: Path) -> None:
    target = tmp_path / "out"

    def make(content: str, *, overwrite: bool = False, source: Path = tmp_path / "in") -> None:
        rules = {"overwrite": overwrite, "replaceable": lambda name: name == "part"}
        with new_directory(target, sources=[source], **rules) as folder:
            (folder / "part").write_text(content)
            if content == "broken":
                raise RuntimeError("interrupted")

    make("first")
    with pytest.raises(OutputError, match="exists; choose another destination"):
        make("second")
    with pytest.raises(RuntimeError):
        make("broken", overwrite=True)
    assert (target / "part").read_text() == "first"
    make("second", overwrite=True)
    assert (target / "part").read_text() == "second"
    with pytest.raises(OutputError, match="which is read"):
        make("third", overwrite=True, source=target / "part")
    (target / "precious").touch()
    with pytest.raises(OutputError, match="holds precious"):
        make("third", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_json_that_is_no_object_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"b": 1})
    assert read_json(path) == {"b": 1}
    path.write_bytes(content)
    assert read_json(path) is None and read_json(tmp_path / "absent.json") is None


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EIO])
def test_a_directory_that_cannot_be_synced_is_no_error_but_a_failed_sync_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    if number == errno.EIO:
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            sync_directory(tmp_path)
    else:
        sync_directory(tmp_path)


def test_a_published_name_is_synced_and_leftovers_of_dead_processes_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(atomic_files, "sync_directory", synced.append)
    target, old = tmp_path / "a.json", temporary_name(tmp_path / "a.json")
    old.write_text("{}")
    publish(old, target)
    assert synced == [tmp_path] and target.read_text() == "{}" and not old.exists()
    dead = 2**22 + 1  # the kernel's largest number of a process is 2**22
    for name, process in ((".a.json", dead), (".b.json", dead), (".a.json", os.getpid())):
        (tmp_path / f"{name}.{process}.0123abcd.tmp").touch()
    remove_leftovers(target)  # written to just now
    assert len(list(tmp_path.glob(".*.tmp"))) == 3
    remove_leftovers(target, older_than_seconds=-1.0)
    left = {f".b.json.{dead}.0123abcd.tmp", f".a.json.{os.getpid()}.0123abcd.tmp"}
    assert {path.name for path in tmp_path.glob(".*.tmp")} == left
