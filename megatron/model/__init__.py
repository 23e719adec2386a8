"""The decoder: GPT-NeoX's layers, with positions as tables over distance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.lazy_names import lazy_names

if TYPE_CHECKING:
    from megatron.model.gpt import GPTModel
    from megatron.model.layer_list import ModelSpec

__all__ = ["GPTModel", "ModelSpec"]

# Importing a kernel must not import the decoder.
__getattr__ = lazy_names(
    __name__, {"megatron.model.gpt": "GPTModel", "megatron.model.layer_list": "ModelSpec"}
)
