"""The one error type that loading a config can raise."""

from __future__ import annotations


class ConfigError(ValueError):
    """A config is wrong: the message names the key or file, the value, and the fix."""
