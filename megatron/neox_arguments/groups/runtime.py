"""The process itself."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ..fields import Group, NonNegativeInt, PositiveFloat, PositiveInt


class RuntimeArgs(Group):
    """Seeds, timeouts, debugging."""

    seed: NonNegativeInt = Field(
        1234, le=2**32 - 1, description="Seed of weights, dropout and (see data_seed) data."
    )
    exit_interval: PositiveInt | None = Field(
        None, description="Save and stop at the first step divisible by this."
    )
    distributed_timeout_minutes: PositiveFloat = Field(
        30.0, description="Give up on a silent peer after this long."
    )
    detect_anomaly: bool = Field(
        False, description="torch's anomaly detection: slow, names the operation behind a NaN."
    )
    deepspeed_extra_args: dict[str, Any] | None = Field(
        None, description="More top-level entries for DeepSpeed's config, passed on as they are."
    )
