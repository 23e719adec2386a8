"""Typed config groups, YAML loading, old names of keys, DeepSpeed's part of the config."""

from __future__ import annotations

from .arguments import GROUPS, KNOWN_KEYS, OWNER, NeoXArgs
from .batch import BatchPlan
from .command_line import decode_config, encode_config, parse_command_line
from .environment import DistributedEnvironment, discover_environment, environment_for
from .errors import ConfigError

__all__ = [
    "GROUPS",
    "KNOWN_KEYS",
    "OWNER",
    "BatchPlan",
    "ConfigError",
    "DistributedEnvironment",
    "NeoXArgs",
    "decode_config",
    "discover_environment",
    "encode_config",
    "environment_for",
    "parse_command_line",
]
