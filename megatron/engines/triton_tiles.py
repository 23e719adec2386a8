"""Tile sizes of the Triton attention kernels: one fixed table.

Fixed, not tuned at run time: the sums of a tile depend on its size, so a table that never changes
by itself keeps a resumed run equal bit for bit. Chosen by `tools/compile_triton.py --ledger`, not
by a clock; `make gpu-check` measures a short list and proposes changes.

What makes a tile good on tensor cores: 32 rows for each warp (each operand that a warp loads from
shared memory then serves two rows of fragments), rows >= columns and rows >= head dimension (or
Triton lays the warps along columns, and the softmax crosses them), two programs on a
multiprocessor where registers and shared memory allow it. The rows of dK and dV are keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tiles:
    """Queries and keys of a tile, and the compiler's options.

    `slice_d`: how much of the head dimension a product over it takes at a time, where all of it
    would not fit in registers (forward and bands; see triton_forward).
    """

    queries: int
    keys: int
    warps: int
    stages: int
    slice_d: int | None = None


KERNELS = ("forward", "dkdv", "dq", "band")
# Rows of lse and delta are padded to a multiple of this, so that inner loops load them unmasked:
# the queries of every tile divide it.
ROW_MULTIPLE = 128


def _row(*tiles: tuple[int, ...]) -> dict[int, Tiles]:
    """By the padded head dimension."""
    return {dim: Tiles(*tile) for dim, tile in zip((32, 64, 128, 256), tiles, strict=True)}


# by kernel, then by (half precision, a weight table), then for head dimensions 32, 64, 128 and 256
_TILES: dict[str, dict[tuple[bool, bool], dict[int, Tiles]]] = {
    "forward": {
        (True, False): _row((128, 64, 4, 2), (128, 64, 4, 2), (128, 32, 4, 2), (128, 32, 8, 2)),
        (True, True): _row((128, 32, 4, 2), (128, 32, 4, 2), (128, 32, 4, 2), (128, 32, 8, 2)),
        (False, False): _row((64, 32, 8, 2), (64, 32, 8, 2), (32, 16, 8, 1), (32, 16, 8, 1, 64)),
    },
    "dkdv": {
        (True, False): _row((32, 128, 4, 2), (32, 128, 4, 2), (64, 128, 8, 2), (32, 64, 8, 1)),
        (True, True): _row((32, 128, 4, 2), (16, 128, 4, 2), (16, 128, 8, 2), (32, 64, 8, 1)),
        (False, False): _row((16, 64, 8, 1), (16, 64, 8, 1), (16, 32, 8, 1), (16, 16, 8, 1)),
    },
    "dq": {
        (True, False): _row((128, 32, 4, 2), (128, 32, 4, 2), (128, 32, 4, 2), (64, 32, 8, 1)),
        (True, True): _row((128, 32, 4, 2), (128, 32, 4, 2), (128, 16, 4, 2), (64, 32, 8, 1)),
        (False, False): _row((64, 16, 8, 1), (64, 16, 8, 1), (32, 16, 8, 1), (16, 16, 8, 1)),
    },
    "band": {
        (True, False): _row((128, 64, 4, 2), (128, 64, 4, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
        (True, True): _row((128, 32, 4, 2), (128, 32, 4, 2), (128, 32, 8, 2), (64, 32, 8, 2)),
        (False, False): _row(
            (64, 32, 8, 1), (64, 32, 8, 1), (32, 32, 8, 1, 64), (32, 32, 8, 1, 64)
        ),
    },
}
for _tiles in _TILES.values():
    _tiles[False, True] = _tiles[False, False]  # in fp32 a weight table asks for nothing else


# Bands whose table is read inside the walk share the others' workspace, hence their tile, but need
# more registers: here more warps.
_STEEP_WARPS = {(True, 64): 8}


def steep_warps(block_d: int, dtype: torch.dtype, warps: int) -> int:
    return _STEEP_WARPS.get((dtype != torch.float32, block_d), warps)


# Where the H100's instructions want another tile: by kernel, half precision, weight, head dim.
_HOPPER = {("dkdv", True, False, 128): Tiles(32, 128, 8, 2)}


def tiles_of(
    kernel: str, block_d: int, dtype: torch.dtype, weighted: bool, arch: int = 80
) -> Tiles:
    """The tile of a kernel for a padded head dimension, a dtype, and with a weight table or not."""
    half = dtype != torch.float32
    tiles = _TILES[kernel][half, weighted][block_d]
    return _HOPPER.get((kernel, half, weighted, block_d), tiles) if arch >= 90 else tiles
