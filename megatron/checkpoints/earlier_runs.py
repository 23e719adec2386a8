"""Runs of our own that began before a key existed go on as they began.

A saved config of ours names every key that has a value, so a missing one tells its age.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def meaning_then(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What today's keys must be for a saved config of ours to mean what it meant."""
    changes: dict[str, Any] = {}
    if "lr_decay_rule" not in saved:
        changes["lr_decay_rule"] = "earlier"
    return changes
