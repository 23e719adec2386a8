"""Every tile of the table keeps what the kernels take for granted, and fits each kind of GPU."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from megatron.engines.triton_problem import PAD
from megatron.engines.triton_tiles import KERNELS, ROW_MULTIPLE, SHARED_MEMORY, tiles_of
from tools import triton_memory

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("kernel", KERNELS)
def test_tiles_fit_the_padding_and_the_products(kernel: str, arch: int) -> None:
    kinds = ((False, False), (True, False), (False, True))  # a weight table; features
    for dim, dtype, (weighted, features) in product((32, 64, 128, 256), DTYPES, kinds):
        tiles = tiles_of(kernel, dim, dtype, weighted, arch, SHARED_MEMORY[arch], features)
        assert ROW_MULTIPLE % tiles.queries == ROW_MULTIPLE % tiles.keys == 0
        assert tiles.queries + tiles.keys < PAD
        assert min(tiles.queries, tiles.keys) >= 16  # the least that a tensor core multiplies
        assert dim % (tiles.slice_d or dim) == 0
        if kernel == "band":  # its tiles are rows of squares
            assert tiles.queries % tiles.keys == 0
            memory = SHARED_MEMORY[arch]
            steep = tiles_of("steep band", dim, dtype, weighted, arch, memory, features)
            assert (steep.queries, steep.keys) == (tiles.queries, tiles.keys)


def test_shared_memory_of_a_program_is_that_of_cudas_programming_guide() -> None:
    assert SHARED_MEMORY == {80: 166912, 86: 101376, 89: 101376, 90: 232448, 120: 101376}


def test_every_tile_was_compiled_and_fits_the_shared_memory_of_its_gpu() -> None:
    page = triton_memory.parse(triton_memory.PAGE.read_text())
    assert list(page) == [row.cells for row in triton_memory.rows()]
    for row in triton_memory.rows():
        cells = zip(triton_memory.KINDS, page[row.cells], strict=True)
        for arch, (tile, size) in cells:
            why = f"{row.kernel} sm_{arch}: run tools/compile_triton.py --memory"
            assert tile == row.tile(arch), why
            assert size <= SHARED_MEMORY[arch], why


@pytest.mark.parametrize("arch", [86, 89, 120])
def test_a_gpu_of_99_kb_takes_the_small_tiles_whatever_its_age(arch: int) -> None:
    small = SHARED_MEMORY[86]
    for kernel, dim in product(KERNELS, (32, 64, 128, 256)):
        chosen = tiles_of(kernel, dim, torch.bfloat16, False, arch, small)
        assert chosen == tiles_of(kernel, dim, torch.bfloat16, False, 86, small)
    assert tiles_of("dkdv", 128, torch.bfloat16, False, arch, small).queries == 32
