"""The index cache: reused when right, rebuilt when anything about it is wrong."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data import IndexedDatasetWriter, build_train_valid_test_datasets
from megatron.data import index_cache as cache_module
from megatron.data.index_cache import (
    MAGIC,
    PREAMBLE,
    cache_directory,
    cached_arrays,
    read_entry,
    write_entry,
)

KEY = {"sizes": "abc", "length": 4, "documents": [0, 3]}


class Builder:
    """Counts how often the arrays are really built."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, Any]:
        self.calls += 1
        return {"a": np.arange(1000, dtype=np.uint32), "b": np.arange(7, dtype=np.int64) * 3}


def get(directory: Path, builder: Builder, key: dict[str, Any] = KEY) -> dict[str, Any]:
    lengths = {"a": 1000, "b": 7}
    options: dict[str, Any] = {"name": "toy", "lengths": lengths, "check": lambda _: None}
    arrays = cached_arrays(key, builder, directory=directory, **options)
    np.testing.assert_array_equal(arrays["a"], np.arange(1000))
    np.testing.assert_array_equal(arrays["b"], np.arange(7) * 3)
    return arrays


def entry(directory: Path) -> Path:
    (path,) = directory.glob("*.index")
    return path


def test_second_use_reads_what_the_first_wrote(tmp_path: Path) -> None:
    builder = Builder()
    get(tmp_path / "new" / "folder", builder)
    get(tmp_path / "new" / "folder", builder)
    assert builder.calls == 1


def test_another_key_is_another_entry(tmp_path: Path) -> None:
    builder = Builder()
    get(tmp_path, builder)
    get(tmp_path, builder, {**KEY, "length": 5})
    assert builder.calls == 2
    assert len(list(tmp_path.glob("*.index"))) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:300],
        lambda data: data[:5],
        lambda data: b"",
        lambda data: data + b"x",
        lambda data: data[:-20] + bytes([data[-20] ^ 1]) + data[-19:],
        lambda data: data[:40] + b"?" + data[41:],
        lambda data: b"x" * len(data),
    ],
    ids=["cut", "cut early", "cut header", "empty", "longer", "bit", "header", "foreign"],
)
def test_a_damaged_entry_is_rebuilt(
    tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    builder = Builder()
    get(tmp_path, builder)
    path = entry(tmp_path)
    good = path.read_bytes()
    path.write_bytes(damage(good))
    with caplog.at_level(logging.WARNING):
        get(tmp_path, builder)
    assert builder.calls == 2
    assert "building it again" in caplog.text
    assert path.read_bytes() == good


def forge(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite an entry's header, with its length and checksum made right again."""
    data = path.read_bytes()
    _, length, _ = PREAMBLE.unpack(data[: PREAMBLE.size])
    header = json.loads(data[PREAMBLE.size :][:length])
    changed = json.dumps(change(header) or header).encode().ljust(length)
    body = data[PREAMBLE.size + length :]
    header["size"] = PREAMBLE.size + len(changed) + len(body)
    changed = json.dumps(change(header) or header).encode().ljust(length)
    path.write_bytes(PREAMBLE.pack(MAGIC, len(changed), zlib.crc32(changed)) + changed + body)


FORGERIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "pointers": lambda h: h["arrays"][0].update(dtype="|O", length=500),
    "text": lambda h: h["arrays"][0].update(dtype="<U8"),
    "record": lambda h: h["arrays"][0].update(dtype="O,O"),
    "no type": lambda h: h["arrays"][0].update(dtype=None),
    "list as type": lambda h: h["arrays"][0].update(dtype=[["a", "|O"]]),
    "negative length": lambda h: h["arrays"][0].update(length=-1),
    "endless": lambda h: h["arrays"][0].update(length=2**62),
    "length of words": lambda h: h["arrays"][0].update(length="many"),
    "before the file": lambda h: h["arrays"][0].update(offset=-64),
    "beyond the file": lambda h: h["arrays"][0].update(offset=1 << 40),
    "crooked": lambda h: h["arrays"][0].update(offset=1),
    "a list": lambda h: [1],
    "length in quotes": lambda h: h["arrays"][0].update(length=str(h["arrays"][0]["length"])),
    "no key": lambda h: h.update(key=None),
    "no arrays": lambda h: h.update(arrays=None),
    "arrays of numbers": lambda h: h.update(arrays=[1, 2]),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_header_is_never_obeyed(tmp_path: Path, name: str) -> None:
    builder = Builder()
    get(tmp_path, builder)
    forge(entry(tmp_path), FORGERIES[name])
    get(tmp_path, builder)
    assert builder.calls == 2


@pytest.mark.parametrize(
    ("array", "value"), [("documents", 99), ("documents", -1), ("ends", 10**9), ("order", 10**6)]
)
def test_forged_numbers_with_right_checksums_are_not_used(
    tmp_path: Path, array: str, value: int
) -> None:
    with IndexedDatasetWriter(tmp_path / "d") as writer:
        for number in range(4):
            writer.add_document([number] * 10)

    def texts() -> list[list[int]]:
        train, _, _ = build_train_valid_test_datasets(
            tmp_path / "d", "1", (5, 0, 0), 4, cache_dir=tmp_path / "cache"
        )
        assert train is not None
        return [train[i]["text"].tolist() for i in range(len(train))]

    honest = texts()
    path = entry(tmp_path / "cache")
    header = path.read_bytes()[PREAMBLE.size :]
    content, _ = json.JSONDecoder().raw_decode(header.decode("latin-1"))
    arrays = {name: a.copy() for name, a in read_entry(path, content["key"]).items()}
    arrays[array][0] = value
    write_entry(path, content["key"], arrays)
    assert texts() == honest


def test_an_entry_of_other_data_under_the_same_name_is_rebuilt(tmp_path: Path) -> None:
    builder = Builder()
    get(tmp_path, builder)
    mine = entry(tmp_path)
    get(tmp_path / "other", builder, {**KEY, "sizes": "xyz"})
    shutil.copy(entry(tmp_path / "other"), mine)
    get(tmp_path, builder)
    assert builder.calls == 3


def test_changed_data_is_never_served_from_the_old_cache(tmp_path: Path) -> None:
    def build(sizes: list[int]) -> list[int]:
        with IndexedDatasetWriter(tmp_path / "d") as writer:
            for number, size in enumerate(sizes):
                writer.add_document([number] * size)
        train, _, _ = build_train_valid_test_datasets(
            tmp_path / "d", "1", (5, 0, 0), 4, cache_dir=tmp_path / "cache"
        )
        assert train is not None
        return sorted(int(t) for i in range(len(train)) for t in train[i]["text"])

    build([10, 20])
    assert max(build([10, 5, 15])) == 2
    assert len(list((tmp_path / "cache").glob("*.index"))) == 2


def test_without_a_writable_directory_everything_still_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    builder = Builder()
    get(blocked / "cache", builder)
    assert "cannot be written" in caplog.text


def test_a_full_disk_leaves_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module, "write_entry", no_space)
    builder = Builder()
    get(tmp_path, builder)
    assert not list(tmp_path.glob("*.index"))


def test_read_only_data_uses_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert cache_directory(None, tmp_path / "d") == tmp_path / "index_cache"
    monkeypatch.setattr(os, "access", lambda *_: False)
    own = tmp_path / "home" / "kerple-neox" / "index"
    assert cache_directory(None, tmp_path / "d") == own
    assert cache_directory("~/elsewhere", tmp_path / "d") == Path("~/elsewhere").expanduser()


def _rank(directory: Path, barrier: Any, results: Any) -> None:
    builder = Builder()
    barrier.wait()
    for turn in range(10):
        get(directory, builder, {**KEY, "turn": turn})
    results.put(builder.calls)


def test_concurrent_ranks_share_one_cache(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    ranks = [context.Process(target=_rank, args=(tmp_path, barrier, results)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    calls = sum(results.get(timeout=60) for _ in ranks)
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    assert calls == 10  # each entry was built by exactly one of them
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_stuck_lock_does_not_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    monkeypatch.setattr(cache_module, "LOCK_TIMEOUT_SECONDS", 0.2)
    builder = Builder()
    get(tmp_path, builder)
    path = entry(tmp_path)
    path.unlink()
    with path.with_suffix(".lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        get(tmp_path, builder)
    assert builder.calls == 2
