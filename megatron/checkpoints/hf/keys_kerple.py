"""The model keys that a KerpleNeoXConfig carries, derived from the declared ones.

An exported folder holds a file of this name with the same constants written out
(`written_out`), since nothing of ours is there to derive them from.
"""

from __future__ import annotations

import pprint
from typing import Any

from megatron.neox_arguments.model_keys import POSITION_OPTIONS, hugging_face_keys

DEFAULTS: dict[str, Any] = {key.name: key.default for key in hugging_face_keys()}
"""Name in config.json -> default."""
NAMES: dict[str, str] = {key.key: key.name for key in hugging_face_keys() if key.key != key.name}
"""GPT-NeoX's name of a key -> the one in config.json, where they differ."""

__all__ = ["DEFAULTS", "NAMES", "POSITION_OPTIONS", "written_out"]


def written_out() -> str:
    """This file as it stands beside an exported model."""
    return (
        '"""The model keys of KerpleNeoXConfig: their defaults, and where GPT-NeoX\'s name differs.'
        '"""\n\n'
        f"DEFAULTS = {pprint.pformat(DEFAULTS, sort_dicts=False)}\n"
        f"NAMES = {pprint.pformat(NAMES, sort_dicts=False)}\n"
        f"POSITION_OPTIONS = {pprint.pformat(POSITION_OPTIONS)}\n"
    )
