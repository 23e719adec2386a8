"""The decoder: GPT-NeoX's layers, with positions as tables over distance."""

from __future__ import annotations

from megatron.model.gpt import GPTModel
from megatron.model.layer_list import ModelSpec

__all__ = ["GPTModel", "ModelSpec"]
