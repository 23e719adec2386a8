"""The keys that an exported config carries."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.checkpoints.hf import folder
from megatron.checkpoints.hf.folder import FORMULA_FILES, MODEL_FILES
from megatron.model import rotary_and_input_positions
from megatron.neox_arguments.model_keys import HFKey, hugging_face_keys


@pytest.mark.parametrize("key", hugging_face_keys(), ids=lambda key: key.key)
def test_every_key_of_the_exported_config_is_read_by_the_exported_code(key: HFKey) -> None:
    """A key that is declared, exported and then forgotten would make another model."""
    folders = {name: Path(folder.__file__).parent for name in MODEL_FILES}
    folders |= {name: Path(rotary_and_input_positions.__file__).parent for name in FORMULA_FILES}
    source = "".join((folders[name] / name).read_text() for name in folders)
    told_only = {"train_length"}
    reading = rf"(config|options)\.({key.name}|{key.key})\b|PerHeadNumber\(\s*\"{key.key}\""
    assert key.name in told_only or re.search(reading, source)
