"""The error users see when an attention engine cannot do what was asked."""

from __future__ import annotations


class EngineError(ValueError):
    """An attention call, or a forced engine, that cannot work; the message says why and the fix."""
