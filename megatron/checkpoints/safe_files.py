"""Checkpoint files are data, not programs: tensors and plain containers, and nothing that runs.

Everything goes through one loader, `load_file`, with one allow-list. Before torch reads a file, its
archive and its pickle are looked through: nothing compressed, one reading of the archive only, no
name outside the list, no call that makes a tensor of anything but the file's bytes
(`pickle_check`). Then `torch.load(weights_only=True)` reads it.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import pickletools
import struct
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.backends.deepspeed_processes import state_classes
from megatron.checkpoints.pickle_check import ITEM_BYTES, RefusedPickleError, check_calls
from megatron.checkpoints.store import ChecksummedFile, Sums
from megatron.errors import CheckpointError

MAX_PICKLE_BYTES = 1 << 28
MAX_MEMBERS = 1_000_000
TORCH_NAMES = frozenset(
    {
        "collections.OrderedDict", "_codecs.encode", "torch.Size", "torch.device", "torch.Tensor",
        "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter",
        "torch._tensor._rebuild_from_type_v2", "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout", *ITEM_BYTES,
        "torch.float64", "torch.float32", "torch.float16", "torch.bfloat16", "torch.int64",
        "torch.int32", "torch.int16", "torch.int8", "torch.uint8", "torch.bool",
    }
)  # fmt: skip
"""What every file of tensors names."""


def _by_name(classes: list[Any]) -> dict[str, Any]:
    return {f"{found.__module__}.{found.__qualname__}": found for found in classes}


_ARRAYS: Any = np._core.multiarray  # type: ignore[attr-defined]
OTHER_NAMES: dict[str, Any] = _by_name(
    [np.ndarray, np.dtype, *{type(np.dtype(code)) for code in "?bBhHiIlLqQefd"}, Namespace]
) | {
    f"numpy.{core}.multiarray.{name}": getattr(_ARRAYS, name)
    for core in ("core", "_core")
    for name in ("_reconstruct", "scalar")
}  # fmt: skip
"""Plain classes in training states: random states, options."""


def load_mapping(path: Path) -> dict[str, Any]:
    """The mapping stored in one `.pt` file, its tensors mapped from the disk."""
    content = load_file(path, mmap=True)
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path}: holds a {type(content).__name__}, not a mapping of names to tensors"
        )
    return content


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: is not a regular file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not readable as JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: is not a JSON object")
    return content


def load_file(path: str | Path, map_location: Any = "cpu", *, mmap: bool = False) -> Any:
    """What is stored in one `.pt` file, if it is nothing but data."""
    path = Path(path)
    try:
        str(path).encode()  # torch takes names as UTF-8
        data, records = _checked_archive(path)
        names = _names_in(data)
        others = OTHER_NAMES
        if any(name.startswith("deepspeed.") for name in names) and find_spec("deepspeed"):
            others = others | _by_name(state_classes())
        if unknown := sorted(names - TORCH_NAMES - others.keys()):
            raise CheckpointError(
                f"{path}: refused, because it holds more than data (objects of "
                f"{', '.join(unknown)[:200]}). Loading them would run code of the file. If you "
                "trust its origin, save its tensors alone again with torch.save."
            )
        check_calls(data, records)
        allowed: list[Any] = [(found, name) for name, found in others.items()]
        with torch.serialization.safe_globals(allowed):
            content = torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such checkpoint file") from None
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{str(path)!a}: its name cannot be read in this locale; set LC_ALL=C.UTF-8"
        ) from error
    except CheckpointError:
        raise
    except RefusedPickleError as error:
        raise CheckpointError(
            f"{path}: refused, because it is not a file of torch.save: {error}"
        ) from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: refused, because it holds more than data. Only tensors, plain containers and "
            "DeepSpeed's own state are read."
        ) from error
    except Exception as error:  # whatever a broken file leads zipfile, pickletools and torch to
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise CheckpointError(
            f"{path}: cannot be read ({reason}); it is incomplete, damaged or not a checkpoint "
            "file: copy or save it again"
        ) from error
    for tensor in _tensors(content):
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise CheckpointError(
                f"{path}: refused, because a tensor of shape {tuple(tensor.shape)} would need more "
                "memory than the file has for it"
            )
    return content


def _checked_archive(path: Path) -> tuple[bytes, dict[str, int]]:
    """The file's pickle as torch will read it, and the sizes of the archive's records."""
    if not path.exists():
        raise FileNotFoundError(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: is not a regular file")
    size = path.stat().st_size
    _check_one_reading(path)
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    total = sum(member.file_size for member in members)
    compressed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
    if compressed or total > size or len(members) > MAX_MEMBERS:
        raise CheckpointError(
            f"{path}: refused, because it would unpack to more than the {size} bytes it has"
        )
    # torch's reader finds names in any case: two that differ in it alone are one to it.
    records = {member.filename.partition("/")[2]: member.file_size for member in members}
    if len({member.filename.lower() for member in members}) < len(members):
        raise CheckpointError(f"{path}: refused, because its archive has one name twice")
    if (
        max((n for name, n in records.items() if name.endswith("pkl")), default=0)
        > MAX_PICKLE_BYTES
    ):
        raise CheckpointError(f"{path}: refused, its table of contents is too big")
    return torch._C.PyTorchFileReader(str(path)).get_record("data.pkl"), records


def _check_one_reading(path: Path) -> None:
    """Refuse an archive that Python's zip reader and torch's could read differently.

    One takes the zip64 end record before the locator, the other the one that it points to; torch
    reads what does not begin like an archive as a bare pickle. In a file of torch.save, the
    directory of its members, the zip64 record, the locator and the end record follow each other up
    to the last byte.
    """
    with path.open("rb") as file:
        begin = file.read(4)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 98, 0))
        tail = file.read()
    end = tail[-22:]
    if begin != b"PK\x03\x04" or end[:6] != b"PK\x05\x06\0\0" or end[-2:] != b"\0\0":
        raise zipfile.BadZipFile("it does not begin and end like a file of torch.save")
    length, start = struct.unpack("<II", end[12:20])
    directory_end = size - 22
    if tail[-42:-38] == b"PK\x06\x07":
        (place,) = struct.unpack("<Q", tail[-34:-26])
        directory_end = size - 98
        if place != directory_end or tail[-98:-94] != b"PK\x06\x06":
            raise zipfile.BadZipFile("its two ends do not agree")
        length, start = struct.unpack("<QQ", tail[-58:-42])
    if start + length != directory_end:
        raise zipfile.BadZipFile("its directory does not end where its end record begins")


def _names_in(data: bytes) -> set[str]:
    names = set()
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("GLOBAL", "INST"):
            names.add(str(argument).replace(" ", "."))
        elif opcode.name in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):
            names.add(opcode.name)  # a name that cannot be seen beforehand
    return names


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    stack = [value]
    seen: set[int] = set()
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, dict | list | tuple | set) and id(item) not in seen:
            seen.add(id(item))  # a pickle may hold itself
            stack.extend(item.values() if isinstance(item, dict) else item)


# Writing: synced, and summed on the way.


def synced_save(state: Any, path: str | Path) -> tuple[int, str]:
    """torch.save, then wait until the bytes are on the disk; their number and checksum."""
    try:
        with Path(path).open("wb") as file:
            summed = ChecksummedFile(file)
            torch.save(state, summed)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
            return summed.size, summed.checksum
    except RuntimeError as error:
        # torch.save loses its place when a write fails, and reports that instead of the reason.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def host_copy(value: Any) -> Any:
    """`value` as it is now, with its tensors' numbers in host memory; what was shared stays so.

    Copies from a GPU go into pinned memory, all of them at the same time.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[int, Any] = {}
    for tensor in _tensors(value):
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = _host_storage(storage)
        copied = torch.empty(0, dtype=tensor.dtype).set_(
            storages[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        if isinstance(tensor, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=False)
        vars(copied).update(vars(tensor))
        copies[id(tensor)] = copied.requires_grad_(tensor.requires_grad)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return copy.deepcopy(value, copies)  # the rest, with these in the tensors' places


def _host_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    if not storage.is_cuda:
        return storage.clone()
    pinned = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True).untyped_storage()
    return pinned.copy_(storage, non_blocking=True)


class TrainingFiles:
    """What an engine uses for every file of a training.

    It executes nothing it reads, syncs and sums what it writes. A write that fails (a full disk)
    is raised in `finish` only: DeepSpeed's ranks wait in barriers between their files, and would
    wait for a rank that has left.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self, *, later: bool = False) -> None:
        """Before the engine saves; `later` keeps copies in host memory, for `write_kept`."""
        self._failure: Exception | None = None
        self._written: dict[Path, tuple[int, str]] = {}
        self._later: list[tuple[Any, str]] | None = [] if later else None

    def finish(self, directory: Path) -> Sums:
        """After the engine saved: what this rank has written there, or raise what went wrong."""
        if self._failure is not None:
            raise self._failure
        return {
            path.relative_to(directory).as_posix(): entry
            for path, entry in self._written.items()
            if path.is_relative_to(directory)
        }

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.attempt(lambda: os.makedirs(path, exist_ok=exist_ok))  # noqa: PTH103

    def save(self, state_dict: Any, path: str) -> None:
        def write() -> None:
            if self._later is None:
                self._written[Path(path)] = synced_save(state_dict, path)
            else:
                self._later.append((host_copy(state_dict), path))

        self.attempt(write)

    def write_kept(self, wanted: Callable[[], bool]) -> None:
        """Write what was kept for later, while it is `wanted`; called by another thread."""
        kept, self._later = self._later or [], None
        while kept and wanted():
            self.save(*kept.pop(0))

    def load(self, path: str, map_location: Any = None) -> Any:
        return load_file(path, map_location)

    def attempt(self, write: Callable[[], None]) -> None:
        """Write, unless something before it failed; what goes wrong is for `finish`."""
        if self._failure is not None:
            return
        try:
            write()
        except (OSError, RuntimeError) as error:
            self._failure = error
