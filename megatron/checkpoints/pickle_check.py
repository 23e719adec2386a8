"""A dry run of a checkpoint's pickle: which calls torch would make, checked before it makes them.

`torch.load(weights_only=True)` calls every class and function on its list with any arguments:
`torch.Tensor(128, 48)`, `UntypedStorage(n)` and numpy's `_reconstruct` make tensors of
uninitialised memory. Here the same opcodes are executed on placeholders. A tensor must view a
storage, a storage must be a record of the archive, and neither may be larger than that record.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

ITEM_BYTES = {
    "torch.storage.UntypedStorage": 1, "torch.ByteStorage": 1, "torch.CharStorage": 1,
    "torch.BoolStorage": 1, "torch.ShortStorage": 2, "torch.HalfStorage": 2,
    "torch.BFloat16Storage": 2, "torch.IntStorage": 4, "torch.FloatStorage": 4,
    "torch.LongStorage": 8, "torch.DoubleStorage": 8,
}  # fmt: skip
"""Types of storages -> bytes of a number."""
NEVER_CALLED = frozenset(
    {"torch.Tensor", "torch.nn.parameter.Parameter", "numpy.ndarray", *ITEM_BYTES}
)
"""Named as the type of something; called, they make tensors without numbers."""
_TENSOR, _STORAGE = "a tensor", "a storage"
_DTYPE = re.compile(r"[<>|=]?[?bBhHiIlLqQefdu]\d{0,2}")
# The opcodes that torch's reader accepts.
_OPCODES = (
    "GLOBAL NEWOBJ REDUCE BUILD APPEND APPENDS SETITEM SETITEMS MARK TUPLE TUPLE1 TUPLE2 TUPLE3 "
    "NONE NEWFALSE NEWTRUE EMPTY_TUPLE EMPTY_LIST EMPTY_DICT EMPTY_SET BININT BININT1 BININT2 "
    "BINFLOAT BINUNICODE SHORT_BINSTRING BINPERSID BINGET LONG_BINGET BINPUT LONG_BINPUT LONG1 "
    "PROTO STOP"
)


class RefusedPickleError(Exception):
    """What the pickle would do, in a few words."""


@dataclass(frozen=True, eq=False)
class _Name:
    """A class or function that the pickle names."""

    name: str


@dataclass(frozen=True, eq=False)
class _Made:
    """The result of a call that was not made."""

    kind: str
    items: int = 0
    """Of a storage: how many numbers its record holds."""


def check_calls(data: bytes, records: Mapping[str, int]) -> None:
    """Refuse a pickle that would make a tensor of anything but its archive's `records` (sizes)."""
    _DryRun(data, records).load()


class _DryRun(pickle._Unpickler):  # the one in Python: its table of opcodes can be replaced
    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = {
        code[0]: pickle._Unpickler.dispatch[code[0]]
        for code in (getattr(pickle, name) for name in _OPCODES.split())
    }

    def __init__(self, data: bytes, records: Mapping[str, int]) -> None:
        super().__init__(io.BytesIO(data))
        self._records = records

    def find_class(self, module: str, name: str) -> _Name:
        return _Name(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Made:
        match pid:
            case ("storage", _Name(name), str(key), str(), int(items)) if name in ITEM_BYTES:
                needed, held = items * ITEM_BYTES[name], self._records.get(f"data/{key}", -1)
                if not 0 <= needed <= held:
                    raise RefusedPickleError(
                        f"storage {key:.20} would have {needed} bytes, its record has {held}"
                    )
                return _Made(_STORAGE, items)
        raise RefusedPickleError("it names a storage in an unknown way")

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], arguments)

    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = _reduce

    def _build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        kind = made.kind if isinstance(made, _Made) else type(made).__name__
        if kind in (_TENSOR, _STORAGE):
            raise RefusedPickleError(f"it would replace the content of {kind}")
        if kind == "numpy.dtype" and any(part not in (None, -1) for part in state[2:7]):
            raise RefusedPickleError("it holds an array of unknown type")

    dispatch[pickle.BUILD[0]] = _build

    def _call(self, function: Any, arguments: Any) -> Any:
        if not isinstance(function, _Name) or not isinstance(arguments, tuple):
            raise RefusedPickleError("it would call what is not a function")
        name = function.name
        if name in NEVER_CALLED:
            raise RefusedPickleError(f"{name} would be called, which makes a tensor of no numbers")
        match name.rpartition(".")[2], arguments:
            case "OrderedDict", _:
                return {}
            case "_rebuild_tensor_v2", (_Made(kind, items), int(offset), size, stride, *_):
                if kind == _STORAGE and _last_item(offset, size, stride) <= items:
                    return _Made(_TENSOR)
            case "_rebuild_parameter", (_Made(kind), *_):
                if kind == _TENSOR:
                    return _Made(_TENSOR)
            case "_rebuild_from_type_v2", (_Name() as rebuild, _Name(), tuple(parts), _):
                if rebuild.name.startswith("torch._utils._rebuild_"):
                    return self._call(rebuild, parts)
            case "_reconstruct", (_Name("numpy.ndarray"), (0,), _):
                return _Made(name)
            case "dtype", (str(code), *_):
                if _DTYPE.fullmatch(code):
                    return _Made(name)
            case "encode", (str(text), "latin1"):
                return text.encode("latin1")
            case "Size", (list() | tuple() as size,):
                return tuple(size)
            case (("encode" | "_reconstruct" | "dtype" | "Size"), _):
                pass
            case last, _ if not last.startswith("_rebuild"):
                return _Made(name)
        raise RefusedPickleError(f"{name} would be called with arguments that no tensor has")


def _last_item(offset: int, size: Any, stride: Any) -> float:
    """How many items a storage must have for a tensor that views it; inf for an impossible one."""
    numbers = [offset, *size, *stride]
    if len(size) != len(stride) or any(type(n) is not int or n < 0 for n in numbers):
        return math.inf
    if 0 in size:
        return 0
    return 1 + offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
