"""Typed config groups, YAML loading, old names of keys, DeepSpeed's part of the config."""

from __future__ import annotations

from megatron.errors import ConfigError
from megatron.neox_arguments.allowed_code import allow_kernel
from megatron.neox_arguments.arguments import (
    FACTS,
    GROUPS,
    KNOWN_KEYS,
    OWNER,
    NeoXArgs,
    changes_training,
    of_the_checkpoint,
    same_on_resume,
)
from megatron.neox_arguments.command_line import decode_config, encode_config, parse_command_line
from megatron.neox_arguments.optimization_keys import BatchPlan

__all__ = [
    "FACTS",
    "GROUPS",
    "KNOWN_KEYS",
    "OWNER",
    "BatchPlan",
    "ConfigError",
    "NeoXArgs",
    "allow_kernel",
    "changes_training",
    "decode_config",
    "encode_config",
    "of_the_checkpoint",
    "parse_command_line",
    "same_on_resume",
]
