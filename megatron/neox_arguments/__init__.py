"""Typed config groups, YAML loading, old names of keys, DeepSpeed's part of the config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.lazy_names import lazy_names

if TYPE_CHECKING:
    from megatron.errors import ConfigError
    from megatron.neox_arguments.allowed_code import allow_kernel
    from megatron.neox_arguments.arguments import NeoXArgs
    from megatron.neox_arguments.command_line import (
        decode_config,
        encode_config,
        parse_command_line,
    )
    from megatron.neox_arguments.declared_keys import (
        FACTS,
        GROUPS,
        KNOWN_KEYS,
        OWNER,
        changes_training,
        of_the_checkpoint,
        same_on_resume,
    )
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

# Importing the names of methods must not import pydantic.
__getattr__ = lazy_names(
    __name__,
    {
        "megatron.errors": "ConfigError",
        "megatron.neox_arguments.allowed_code": "allow_kernel",
        "megatron.neox_arguments.arguments": "NeoXArgs",
        "megatron.neox_arguments.command_line": "decode_config encode_config parse_command_line",
        "megatron.neox_arguments.declared_keys": "FACTS GROUPS KNOWN_KEYS OWNER "
        "changes_training of_the_checkpoint same_on_resume",
        "megatron.neox_arguments.optimization_keys": "BatchPlan",
    },
)
