"""Runs of our own that began before a key existed go on as they began.

A saved config of ours names every key that has a value, so a missing one tells its age.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.neox_arguments.model_keys import GATED_ACTIVATIONS, intermediate_size_for


def meaning_then(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What today's keys must be for a saved config of ours to mean what it meant."""
    changes: dict[str, Any] = {}
    if "lr_decay_rule" not in saved:
        changes["lr_decay_rule"] = "earlier"
    if "mlp_multiple_of" not in saved:  # GPT-NeoX's rules for these came with it
        changes |= _sizes_then(saved)
    return changes


def _sizes_then(saved: Mapping[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    activation = saved.get("activation")
    if activation in GATED_ACTIVATIONS:  # the size was the width, in steps of 64 by default
        width = saved.get("intermediate_size") or -(-(8 * saved["hidden_size"] // 3) // 64) * 64
        changes["intermediate_size"] = intermediate_size_for(width, activation)
    if saved.get("sliding_window_width") is not None:  # the query counted
        changes["sliding_window_width"] = saved["sliding_window_width"] - 1
    if saved.get("precision") == "bf16" and "data_types" not in saved:
        changes["data_types"] = {"grad_accum_dtype": "bf16"}
    return changes
