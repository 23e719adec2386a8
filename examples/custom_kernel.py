"""A positional kernel of your own, from outside the package.

Train with it by `pos_emb: custom_kernel:RationalKernel` with this folder on PYTHONPATH. To see its
tables, run `PYTHONPATH=. python examples/custom_kernel.py` from the project's root.
"""

from __future__ import annotations

import torch

from kerple import kernel
from megatron.model.kernel_theory import effective_length, is_cpd
from megatron.model.positional_embeddings import (
    DistanceKernel,
    Positive,
    Uniform,
    register,
)


@register("rational")
class RationalKernel(DistanceKernel):
    """-r1 d / (r2 + d): falls like a line, then levels off at -r1. CPD, since its negative is a
    Bernstein function of d and -d is CPD."""

    learnable = {"r1": Positive(Uniform(0, 8)), "r2": Positive(Uniform(0, 64))}  # noqa: RUF012

    def bias(self, d: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor) -> torch.Tensor:
        return -r1 * d / (r2 + d)


def main() -> None:
    rational = kernel("rational", heads=4)
    table = rational(512).bias.detach()
    print("parameters:", {name: value.tolist() for name, value in rational.kernel_values().items()})
    print("bias at distances 0, 1, 10, 100:", table[:, [0, 1, 10, 100]].tolist())
    print("effective length per head:", effective_length(rational))
    print("CPD on 128 points:", is_cpd(table, points=128))


if __name__ == "__main__":
    main()
