"""Attention with tables over distance: one function, several engines with the same numbers."""

from megatron.model.kernels.dispatch import ENGINES, attention
from megatron.model.kernels.errors import EngineError

__all__ = ["ENGINES", "EngineError", "attention"]
