"""The feed-forward block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron.model.norms_and_activations import GATED, activation_named
from megatron.mpu import SERIAL, ColumnParallelLinear, InitMethod, RowParallelLinear, TensorParallel


class MLP(nn.Module):
    """h -> 4h -> h, or with a gate: half of the first projection multiplies the other."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str,
        bias: bool,
        init: InitMethod,
        output_init: InitMethod,
        generators: Callable[[str], torch.Generator],
        tp: TensorParallel = SERIAL,
    ) -> None:
        super().__init__()
        self.activation = activation_named(activation)
        parts = 2 if activation in GATED else 1
        self.dense_h_to_4h = ColumnParallelLinear(
            hidden_size,
            parts * intermediate_size,
            parts=[intermediate_size] * parts,
            bias=bias,
            init=init,
            generator=generators("mlp.dense_h_to_4h"),
            tp=tp,
        )
        self.dense_4h_to_h = RowParallelLinear(
            intermediate_size,
            hidden_size,
            bias=bias,
            init=output_init,
            generator=generators("mlp.dense_4h_to_h"),
            tp=tp,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.activation(self.dense_h_to_4h(x)))
