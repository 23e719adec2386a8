"""Tile sizes of the Triton attention kernels: one fixed table.

Fixed, not tuned at run time: rounding depends on the tile size, so a fixed table keeps a resumed
run bit-identical. Chosen by `tools/compile_triton.py --ledger`, not by timing; `make gpu-check`
times a short list and proposes changes.

What makes a tile good on tensor cores: 32 rows for each warp (each operand that a warp loads from
shared memory then serves two rows of fragments), rows >= columns and rows >= head dimension (or
Triton lays the warps along columns, and the softmax crosses them), two programs on a
multiprocessor where registers and shared memory allow it. The rows of dK and dV are keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
        (True, True): _row((128, 32, 4, 2), (128, 32, 4, 2), (128, 32, 4, 2), (64, 32, 8, 1)),
        (False, False): _row((64, 16, 8, 1), (64, 16, 8, 1), (32, 16, 8, 1), (16, 16, 8, 1)),
    },
    "band": {
        (True, False): _row((128, 64, 4, 2), (128, 64, 4, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
        (True, True): _row((128, 32, 4, 2), (128, 32, 4, 2), (128, 32, 4, 2), (64, 32, 8, 2)),
        (False, False): _row(
            (64, 32, 8, 1), (64, 32, 8, 1), (32, 32, 8, 1, 64), (32, 32, 8, 1, 64)
        ),
    },
}
for _tiles in _TILES.values():
    _tiles[False, True] = _tiles[False, False]  # in fp32 a weight table asks for nothing else


# Shared memory in bytes that a program may take, by compute capability times ten: A100; A10, A40,
# RTX 30; L4, L40S, RTX 40; H100; RTX 50, RTX Pro. The engine asks the GPU itself.
_KILOBYTES = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
SHARED_MEMORY = {arch: 1024 * size for arch, size in _KILOBYTES.items()}

# Entries that differ, by kernel, half precision, weight table and head dimension.
_Changes = dict[tuple[str, bool, bool, int], Tiles]
# H100: wgmma reads its operands from shared memory, and wide tiles read them less often.
_HOPPER: _Changes = {
    ("forward", True, False, 64): Tiles(128, 128, 8, 2),
    ("forward", True, False, 128): Tiles(128, 128, 8, 2),
    ("dkdv", True, False, 64): Tiles(128, 128, 8, 2),
    ("dkdv", True, False, 128): Tiles(64, 128, 8, 2),
    ("dq", True, False, 64): Tiles(128, 128, 8, 2),
    ("dq", True, False, 128): Tiles(128, 64, 8, 2),
    ("band", True, False, 64): Tiles(128, 128, 8, 2),
    ("forward", True, True, 64): Tiles(128, 64, 4, 2),
    ("forward", True, True, 128): Tiles(128, 64, 8, 2),
    ("dkdv", True, True, 64): Tiles(64, 128, 8, 2),
    ("dkdv", True, True, 128): Tiles(32, 128, 8, 2),
    ("dq", True, True, 64): Tiles(128, 64, 8, 2),
    ("dq", True, True, 128): Tiles(128, 64, 8, 2),
    ("band", True, True, 64): Tiles(128, 64, 8, 2),
    ("band", True, True, 128): Tiles(64, 64, 4, 2),
}
# GPUs with 99 KB of shared memory: the A100's tiles that need more, smaller.
_SMALL: _Changes = {
    ("dkdv", True, False, 128): Tiles(32, 128, 8, 2),
    ("dq", True, True, 128): Tiles(128, 16, 4, 2),
    ("band", True, False, 128): Tiles(64, 64, 4, 2),
    ("band", True, True, 128): Tiles(64, 32, 4, 2),
    ("forward", True, False, 256): Tiles(64, 32, 4, 2),
    ("forward", True, True, 256): Tiles(64, 32, 4, 2),
    ("dkdv", True, False, 256): Tiles(32, 32, 8, 1),
    ("dkdv", True, True, 256): Tiles(32, 32, 8, 1),
    ("band", True, True, 256): Tiles(64, 32, 8, 1),
}
# With query features: the A100's tiles everywhere, or smaller ones, as strips pass through shared
# memory and take registers in dK and dV.
_FEATURES: _Changes = {
    ("dkdv", True, False, 128): Tiles(32, 128, 8, 2),
    ("dq", True, False, 128): Tiles(128, 32, 4, 2),
    ("dq", True, True, 128): Tiles(128, 16, 4, 2),
}
_SMALL_FEATURES = _FEATURES | {
    ("dkdv", True, False, 128): Tiles(32, 128, 8, 1),
    ("dq", True, False, 128): Tiles(128, 16, 4, 2),
}
# The steep band has the band's workspace, hence its tile, but needs more registers (more warps) and
# more shared memory (fewer stages): warps and stages by head dimension, in half precision.
_STEEP = {64: (8, 2)}
_STEEP_HOPPER = {64: (8, 2), 128: (8, 1)}
_STEEP_SMALL = {64: (8, 2), 256: (8, 1)}


def tiles_of(
    kernel: str,
    block_d: int,
    dtype: torch.dtype,
    weighted: bool,
    arch: int = 80,
    shared_memory: int = SHARED_MEMORY[80],
    features: bool = False,
) -> Tiles:
    """The tile of a kernel for a padded head dimension, a dtype, and with a weight table or not.

    `features`: with query features. `shared_memory` is what a program may take, `arch` the compute
    capability times ten. The kernel "steep band" is the band that reads its table inside the loop.
    """
    half = dtype != torch.float32
    small = shared_memory < SHARED_MEMORY[80]
    hopper = arch >= 90 and shared_memory >= SHARED_MEMORY[90]
    changes = _SMALL if small else _HOPPER if hopper else {}
    if features:
        changes = _SMALL | _SMALL_FEATURES if small else _FEATURES
    name = kernel.removeprefix("steep ")
    tiles = changes.get((name, half, weighted, block_d), _TILES[name][half, weighted][block_d])
    if name == kernel or not half:
        return tiles
    steep = _STEEP_SMALL if small else _STEEP_HOPPER if hopper else _STEEP
    warps, stages = steep.get(block_d, (tiles.warps, tiles.stages))
    return replace(tiles, warps=warps, stages=stages)
