"""Every config key: its group, and the facts that its declaration states."""

from __future__ import annotations

from typing import Any, cast, get_args, get_origin

from megatron.neox_arguments.model_keys import ModelArgs
from megatron.neox_arguments.optimization_keys import OptimizationArgs
from megatron.neox_arguments.run_keys import (
    CheckpointArgs,
    DataArgs,
    EvaluationArgs,
    GenerationArgs,
    LauncherArgs,
    LoggingArgs,
    ParallelArgs,
    RuntimeArgs,
    TokenizerArgs,
)
from megatron.neox_arguments.values import Group, facts_of


class ConfigGroups(Group):
    """The typed groups of keys, in the order in which a config is written."""

    model: ModelArgs
    parallel: ParallelArgs
    optimization: OptimizationArgs
    data: DataArgs
    tokenizer: TokenizerArgs
    checkpoint: CheckpointArgs
    logging: LoggingArgs
    evaluation: EvaluationArgs
    generation: GenerationArgs
    launcher: LauncherArgs
    runtime: RuntimeArgs


GROUPS = {
    name: cast(type[Group], field.annotation) for name, field in ConfigGroups.model_fields.items()
}
OWNER: dict[str, str] = {key: name for name, group in GROUPS.items() for key in group.model_fields}
"""Every YAML key -> its group."""
KNOWN_KEYS: list[str] = list(OWNER)
FACTS: dict[str, dict[str, Any]] = {
    key: {"changes": group.changes, **facts_of(field)}
    for group in GROUPS.values()
    for key, field in group.model_fields.items()
}
"""Every YAML key -> what its declaration states (see `values.key`); `changes` is always there."""


def nested_model(annotation: Any) -> type[Group] | None:
    """The type of a nested mapping inside a field's annotation, if there is one."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Group):
            return candidate
    return None


def _is_free(annotation: Any) -> bool:
    return any(get_origin(kind) is dict for kind in (annotation, *get_args(annotation)))


_ANNOTATIONS = {key: GROUPS[owner].model_fields[key].annotation for key, owner in OWNER.items()}
NESTED_BLOCKS = frozenset(key for key, kind in _ANNOTATIONS.items() if nested_model(kind))
"""Keys whose value is a mapping of declared keys."""
FREE_BLOCKS = frozenset(key for key, kind in _ANNOTATIONS.items() if _is_free(kind))
"""Keys whose value is a mapping that is passed on as it is."""


def changes_training(key: str) -> bool:
    """Whether another value of this key trains other weights."""
    return FACTS[key]["changes"] in ("model", "training")


def same_on_resume(key: str) -> bool:
    """Whether a resumed run must keep the value of this key."""
    return bool(FACTS[key].get("resume", "same" if changes_training(key) else "free") == "same")


def of_the_checkpoint(key: str) -> bool:
    """Whether a checkpoint owns this key: evaluation and generation may not change it."""
    facts = FACTS[key]
    return facts["changes"] == "model" and facts.get("evaluate") != "free"
