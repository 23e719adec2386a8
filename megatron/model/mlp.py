"""The feed-forward block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.mpu import SERIAL, ColumnParallelLinear, InitMethod, RowParallelLinear, TensorParallel

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "softsign": F.softsign,
    "swish": F.silu,
    "silu": F.silu,
    "mish": F.mish,
}
GATED: dict[str, Activation] = {"geglu": F.gelu, "swiglu": F.silu, "reglu": F.relu}


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
        if activation not in ACTIVATIONS and activation not in GATED:
            names = ", ".join([*ACTIVATIONS, *GATED])
            raise ValueError(f"activation {activation!r} is unknown; choose one of {names}")
        self.gated = activation in GATED
        self.activation = GATED[activation] if self.gated else ACTIVATIONS[activation]
        parts = 2 if self.gated else 1
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
        y = self.dense_h_to_4h(x)
        if self.gated:
            value, gate = y.chunk(2, dim=-1)
            return self.dense_4h_to_h(value * self.activation(gate))
        return self.dense_4h_to_h(self.activation(y))
