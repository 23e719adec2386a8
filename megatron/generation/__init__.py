"""Text from a model: sampling, batched prompts of different lengths, GPT-NeoX's modes."""

from __future__ import annotations

from megatron.generation.decode import Completion, GenerationError, complete, generate
from megatron.generation.sampling import Sampling

__all__ = ["Completion", "GenerationError", "Sampling", "complete", "generate"]
