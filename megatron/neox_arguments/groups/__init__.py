"""The typed groups of the config: every YAML key is a field of exactly one of them."""

from __future__ import annotations

from .checkpoint import CheckpointArgs
from .data import DataArgs, TokenizerArgs
from .evaluation import EvaluationArgs, GenerationArgs
from .launcher import LauncherArgs
from .logging import LoggingArgs
from .model import ModelArgs, RopeScaling
from .optimization import OptimizationArgs
from .parallel import ParallelArgs
from .runtime import RuntimeArgs

__all__ = [
    "CheckpointArgs",
    "DataArgs",
    "EvaluationArgs",
    "GenerationArgs",
    "LauncherArgs",
    "LoggingArgs",
    "ModelArgs",
    "OptimizationArgs",
    "ParallelArgs",
    "RopeScaling",
    "RuntimeArgs",
    "TokenizerArgs",
]
