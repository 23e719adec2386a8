"""A file of no numbers gives no weights, and the bytes that are checked are those torch reads."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from megatron.checkpoints.safe_files import load_file, synced_save
from megatron.errors import CheckpointError


class Call:
    """Unpickles to function(*arguments)."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def _refused(file: Path, words: str = "refused") -> None:
    for mmap in (False, True):
        with pytest.raises(CheckpointError, match=words):
            load_file(file, mmap=mmap)


UNTYPED = torch.storage.UntypedStorage
MADE_OF_NOTHING: dict[str, Callable[[], Any]] = {
    "Tensor": lambda: Call(torch.Tensor, 128, 48),
    "FloatStorage": lambda: Call(torch.FloatStorage, 4096),
    "UntypedStorage": lambda: Call(UNTYPED, 1 << 20),
    "ndarray": lambda: Call(np.ndarray, (1 << 20,)),
    "_reconstruct": lambda: Call(np._core.multiarray._reconstruct, np.ndarray, (1 << 20,), b"b"),  # type: ignore[attr-defined]
    "rebuilt_of_storage": lambda: Call(
        torch._utils._rebuild_tensor_v2, Call(UNTYPED, 64), 0, (4,), (1,), False, OrderedDict()
    ),
    "rebuilt_from_type": lambda: Call(
        torch._tensor._rebuild_from_type_v2, UNTYPED, torch.Tensor, (1 << 20,), {}
    ),
    "a larger view": lambda: Call(
        torch._utils._rebuild_tensor_v2,
        torch.zeros(4).storage(),
        0,
        (1 << 20,),
        (1,),
        False,
        OrderedDict(),
    ),
    "an offset": lambda: Call(
        torch._utils._rebuild_tensor_v2,
        torch.zeros(4).storage(),
        2,
        (3,),
        (1,),
        False,
        OrderedDict(),
    ),
    "slow codec": lambda: Call(__import__("_codecs").encode, "a" * 9, "idna"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("made", MADE_OF_NOTHING)
def test_a_tensor_without_numbers_in_the_file_is_refused(tmp_path: Path, made: str) -> None:
    torch.save({"module": {"w": MADE_OF_NOTHING[made]()}}, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size < 4096
    _refused(tmp_path / "x.pt")


class Stated:
    """A type of numpy whose state says that it is an array of others."""

    def __reduce__(self) -> tuple[Any, ...]:
        inner = (np.dtype("f4"), (2,))
        return np.dtype, ("f4", False, True), (3, "<", inner, None, None, -1, -1, 0)


def test_a_type_made_of_others_is_refused(tmp_path: Path) -> None:
    torch.save({"w": Stated()}, tmp_path / "x.pt")
    _refused(tmp_path / "x.pt", "array of unknown type")


def _rewritten(source: Path, target: Path, change: Callable[[str, bytes], bytes]) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))


def test_a_storage_larger_than_its_record_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(1000.0)}, tmp_path / "x.pt")
    _rewritten(
        tmp_path / "x.pt",
        tmp_path / "y.pt",
        lambda name, data: data[:40] if name.endswith("data/0") else data,
    )
    _refused(tmp_path / "y.pt", "its record has 40")


def test_the_content_of_a_tensor_is_not_replaced(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(4)}, tmp_path / "x.pt")

    def build(name: str, data: bytes) -> bytes:
        if not name.endswith("data.pkl"):
            return data
        end = data.rindex(b"s.") if data.endswith(b"s.") else len(data) - 2
        return data[:end] + pickle.EMPTY_TUPLE + pickle.BUILD + data[end:]

    _rewritten(tmp_path / "x.pt", tmp_path / "y.pt", build)
    _refused(tmp_path / "y.pt", "replace the content of a tensor")


def test_what_training_saves_is_read(tmp_path: Path) -> None:
    marked = torch.zeros(2)
    marked.label = "kernel"  # type: ignore[attr-defined]
    base = torch.arange(24.0).view(4, 6)
    state = {
        "views": [base[1:, ::2], base.t(), base[0, 0], torch.empty(0, 3)],
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        "marked": marked,
        "random": np.random.RandomState(3).get_state(),
        "number": np.float64(2.5),
        "ordered": OrderedDict(a=torch.ones(1, dtype=torch.bool)),
        "size": torch.Size([2, 3]),
        "types": {
            str(dtype): torch.ones(3, dtype=dtype)
            for dtype in (torch.int64, torch.float64, torch.int16, torch.int8, torch.float16)
        },
        "scaler": DynamicLossScaler(2.0**16, 2.0, 1000, 1.0, 1, False),
        "plain": [1, 2.5, None, True, ("a", b"\xff")],
    }
    synced_save(state, tmp_path / "x.pt")
    for mmap in (False, True):
        found = load_file(tmp_path / "x.pt", mmap=mmap)
        for view, expected in zip(found["views"], state["views"], strict=True):
            assert torch.equal(view, expected)
        assert np.array_equal(found["random"][1], state["random"][1])  # type: ignore[index]
        assert found["number"] == 2.5 and found["plain"] == state["plain"]
        assert found["scaler"].cur_scale == 2.0**16 and found["size"] == state["size"]
        assert found["ordered"]["a"].item() is True


def _ends(data: bytes) -> tuple[bytes, bytes, bytes]:
    """An archive up to its zip64 end record, that record, and its end record."""
    assert data[-42:-38] == b"PK\x06\x07" and data[-98:-94] == b"PK\x06\x06"
    return data[:-98], data[-98:-42], data[-22:]


def test_an_archive_with_two_ends_is_refused(tmp_path: Path) -> None:
    """Python reads the zip64 record before the locator, torch the one that it points to."""
    shown, hidden = tmp_path / "shown.pt", tmp_path / "hidden.pt"
    torch.save({"w": torch.zeros(4)}, shown)
    torch.save({"w": torch.ones(9)}, hidden)
    first, second = hidden.read_bytes(), shown.read_bytes()
    body, record, end = _ends(second)
    locator = b"PK\x06\x07" + struct.pack("<IQI", 0, len(first) - 98, 1)
    both = tmp_path / "both.pt"
    # Without the refusal, zipfile would list the second archive and torch load the first.
    both.write_bytes(first + body + record + locator + end)
    _refused(both, "cannot be read")


@pytest.mark.parametrize("how", ["comment", "prefix", "case", "twice"])
def test_an_archive_that_can_be_read_in_two_ways_is_refused(tmp_path: Path, how: str) -> None:
    file, target = tmp_path / "x.pt", tmp_path / "y.pt"
    torch.save({"w": torch.zeros(4)}, file)
    data = file.read_bytes()
    if how == "comment":
        target.write_bytes(data[:-2] + struct.pack("<H", 22) + data[-22:])
    elif how == "prefix":
        target.write_bytes(pickle.dumps(1, 2) + data)
    else:
        other = "x/data.PKL" if how == "case" else "x/data.pkl"
        with zipfile.ZipFile(file) as old, zipfile.ZipFile(target, "w") as new:
            for name in [*old.namelist(), "x/data.pkl"]:
                chosen = other if name == "x/data.pkl" and name in new.namelist() else name
                new.writestr(chosen, old.read(name))
    _refused(target, "refused|cannot be read")


def test_a_name_that_the_locale_cannot_read_is_not_called_damage(tmp_path: Path) -> None:
    file = Path(os.fsdecode(os.fsencode(tmp_path) + b"/mod\xe8le.pt"))
    with file.open("wb") as handle:
        torch.save({"w": torch.zeros(2)}, handle)
    with pytest.raises(
        CheckpointError, match="cannot be read in this locale; set LC_ALL"
    ) as caught:
        load_file(file)
    assert "damaged" not in str(caught.value)


@pytest.mark.timeout(60)
def test_a_fifo_and_a_device_are_no_checkpoint_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.pt")
    (tmp_path / "y.pt").symlink_to("/dev/zero")
    for name in ("x.pt", "y.pt"):
        with pytest.raises(CheckpointError, match="is not a regular file"):
            load_file(tmp_path / name)
