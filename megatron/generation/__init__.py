"""Text from a model: sampling, batched prompts of different lengths, GPT-NeoX's modes."""

from __future__ import annotations

from megatron.errors import GenerationError
from megatron.generation.decoding import Completion, Sampling, complete, generate

__all__ = ["Completion", "GenerationError", "Sampling", "complete", "generate"]
