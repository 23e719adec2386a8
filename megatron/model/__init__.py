"""The decoder: GPT-NeoX's layers, with positions as tables over distance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.model.gpt import GPTModel
from megatron.model.spec import ModelSpec
from megatron.mpu import SERIAL, TensorParallel

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

__all__ = ["GPTModel", "ModelSpec", "build_model"]


def build_model(args: NeoXArgs, *, padded_vocab_size: int, tp: TensorParallel = SERIAL) -> GPTModel:
    """The model that a config describes, freshly initialised, without a pipeline."""
    return GPTModel(ModelSpec.from_args(args, padded_vocab_size), tp)
