"""Files of safetensors, read and written tensor by tensor.

A file is eight bytes with the length of its header, the header (JSON: type, shape and place of each
tensor) and the numbers one after the other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megatron.checkpoints.lazy_weights import LazyWeights
from megatron.errors import CheckpointError

SHARD_BYTES = 5 * 10**9
"""The largest file that an export writes, as transformers; a larger tensor has one of its own."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_safetensors(paths: Sequence[Path]) -> LazyWeights:
    """The tensors of these files; one file is open at a time, since its pages count as memory."""
    where: dict[str, Path] = {}
    outlines: dict[str, Tensor] = {}
    for path in paths:
        file = _opened(path)
        for name in file.keys():  # noqa: SIM118 - it is not a mapping
            header = file.get_slice(name)
            kind = header.get_dtype()
            if kind not in DTYPES:
                raise CheckpointError(
                    f"{path}: {name} has the type {kind}, which is not read; there are "
                    f"{', '.join(DTYPES)}"
                )
            where[name] = path
            outlines[name] = torch.empty(header.get_shape(), dtype=DTYPES[kind], device="meta")
        del file
    current: list[Any] = [None, None]

    def read(name: str) -> Tensor:
        if current[0] != where[name]:
            current[:] = [None, None]
            current[:] = [where[name], _opened(where[name])]
        tensor: Tensor = current[1].get_tensor(name)
        return tensor

    return LazyWeights(outlines, read)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except Exception as error:  # SafetensorError, and torch's errors for forged shapes
        raise CheckpointError(f"{path}: cannot be read ({error}); copy it again") from error


def write_safetensors(
    folder: Path,
    outlines: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """model.safetensors, or several files of at most `shard_bytes` with their index.

    `tensors` come in the order of `outlines`; each is written before the next is read.
    """
    shards: list[list[str]] = [[]]
    sizes = {name: each.numel() * each.element_size() for name, each in outlines.items()}
    filled = 0
    for name, size in sizes.items():
        if filled and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    count = len(shards)
    files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    files = files if count > 1 else ["model.safetensors"]
    source = iter(tensors)
    for file, names in zip(files, shards, strict=True):
        _write_file(folder / file, {name: outlines[name] for name in names}, source)
    if count > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {
                n: file for file, names in zip(files, shards, strict=True) for n in names
            },
        }
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _write_file(path: Path, outlines: Mapping[str, Tensor], source: Any) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, each in outlines.items():
        start, end = end, end + each.numel() * each.element_size()
        shape = list(each.shape)
        header[name] = {"dtype": _NAMES[each.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(math.ceil(len(text) / 8) * 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in outlines:
            found, tensor = next(source)
            if found != name or tensor.shape != outlines[name].shape:
                raise CheckpointError(f"{path}: {found} {tuple(tensor.shape)} comes as {name}")
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
            del tensor
