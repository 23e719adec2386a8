"""All that is needed to build a model, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from megatron.errors import ConfigError
from megatron.neox_arguments.model_keys import ModelArgs
from megatron.neox_arguments.optimization_keys import OptimizationArgs
from megatron.neox_arguments.run_keys import DataArgs, RuntimeArgs
from megatron.neox_arguments.validation import describe_validation_error
from megatron.neox_arguments.values import Group, PositiveInt

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

__all__ = ["ModelSpec"]


def _declared(group: type[Group], key: str) -> Any:
    """A key of another group, as it is declared there."""
    return group.model_fields[key]


class ModelSpec(ModelArgs):
    """The model's keys of a config, with the padded vocabulary and what other groups decide."""

    padded_vocab_size: PositiveInt
    seed: int = _declared(RuntimeArgs, "seed")
    checkpoint_activations: bool = _declared(OptimizationArgs, "checkpoint_activations")
    checkpoint_num_layers: int = _declared(OptimizationArgs, "checkpoint_num_layers")
    reset_attention_mask: bool = _declared(DataArgs, "reset_attention_mask")
    reset_position_ids: bool = _declared(DataArgs, "reset_position_ids")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError("\n".join(describe_validation_error(error, type(self)))) from error

    @classmethod
    def from_args(cls, args: NeoXArgs, padded_vocab_size: int) -> ModelSpec:
        """The model that a config describes."""
        return cls(
            **dict(args.model),
            padded_vocab_size=padded_vocab_size,
            seed=args.runtime.seed,
            checkpoint_activations=args.optimization.checkpoint_activations,
            checkpoint_num_layers=args.optimization.checkpoint_num_layers,
            reset_attention_mask=args.data.reset_attention_mask,
            reset_position_ids=args.data.reset_position_ids,
        )

    def replace(self, **changes: Any) -> ModelSpec:
        """The same model but for these keys."""
        return ModelSpec(**{**dict(self), **changes})
