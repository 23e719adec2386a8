"""Saving and loading."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..fields import Group, NonNegativeInt, PositiveInt, PositiveIntList


class CheckpointArgs(Group):
    """Where checkpoints go, how often, and what is read back."""

    save: str | None = Field(None, description="Run directory for checkpoints and metrics.")
    load: str | None = Field(None, description="Run directory to resume or evaluate.")
    checkpoint_factor: PositiveInt | None = Field(
        None,
        description="Save every this many steps (linear) or at its powers (log). `save_interval` "
        "is the old name. The last step is always saved.",
    )
    checkpoint_scale: Literal["linear", "log"] = Field(
        "linear", description="Spacing of checkpoints."
    )
    extra_save_iters: PositiveIntList | None = Field(None, description="More steps to save at.")
    keep_last_n_checkpoints: PositiveInt | None = Field(
        None, description="Delete older checkpoints; null keeps all."
    )
    iteration: NonNegativeInt | None = Field(
        None, description="Load this step instead of the one named in `latest`."
    )
    finetune: bool = Field(
        False, description="Load weights only and start from step 0 with a fresh optimizer."
    )
    no_save_optim: bool = Field(False, description="Leave the optimizer out of checkpoints.")
    no_save_rng: bool = Field(False, description="Leave random states out of checkpoints.")
    no_load_optim: bool = Field(False, description="Do not load the optimizer.")
    no_load_rng: bool = Field(False, description="Do not load random states.")
    checkpoint_validation_with_forward_pass: bool = Field(
        False, description="Save logits of a probe with each checkpoint and compare on load."
    )
