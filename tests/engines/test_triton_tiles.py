"""Every tile of the table keeps what the kernels take for granted."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from megatron.engines.triton_problem import PAD
from megatron.engines.triton_tiles import KERNELS, ROW_MULTIPLE, tiles_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("kernel", KERNELS)
def test_tiles_fit_the_padding_and_the_products(kernel: str, arch: int) -> None:
    for dim, dtype, weighted in product((32, 64, 128, 256), DTYPES, (False, True)):
        tiles = tiles_of(kernel, dim, dtype, weighted, arch)
        assert ROW_MULTIPLE % tiles.queries == ROW_MULTIPLE % tiles.keys == 0
        assert tiles.queries + tiles.keys < PAD
        assert min(tiles.queries, tiles.keys) >= 16  # the least that a tensor core multiplies
        assert dim % (tiles.slice_d or dim) == 0
        if kernel == "band":  # its tiles are rows of squares
            assert tiles.queries % tiles.keys == 0
