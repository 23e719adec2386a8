"""The one error type that a user of tools/reproduce.py sees."""

from __future__ import annotations

__all__ = ["ReproduceError"]


class ReproduceError(ValueError):
    """A suite, a run directory or a cluster setting is wrong; the message says what to do."""
