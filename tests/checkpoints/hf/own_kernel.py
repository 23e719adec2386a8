"""A positional embedding that only this test knows."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from megatron.model.position_base import DistanceKernel
from megatron.model.positional_embeddings import Positive, Uniform


class OwnKernel(DistanceKernel):
    learnable: ClassVar = {"r1": Positive(Uniform(0, 1))}

    def bias(self, d: Tensor, r1: Tensor) -> Tensor:
        return -r1 * d.sqrt()
