"""The one error type of the data package."""

from __future__ import annotations

__all__ = ["DataError"]


class DataError(ValueError):
    """A data file, path or setting is unusable; the message names it, the reason and the fix."""
