"""What users get to see when an evaluation cannot be done."""

from __future__ import annotations

__all__ = ["EvaluationError"]


class EvaluationError(ValueError):
    """Something asked for cannot be measured; the message says what and how to change it."""
