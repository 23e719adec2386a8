"""Attention with tables over distance: one function, several engines with the same numbers."""

from megatron.engines.dispatch import ENGINES, attention
from megatron.errors import EngineError

__all__ = ["ENGINES", "EngineError", "attention"]
