"""The error users see when a checkpoint cannot be read, placed or written."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file or parameter, and the fix."""
