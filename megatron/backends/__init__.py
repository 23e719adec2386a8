"""Training backends, DeepSpeed and plain torch, behind the interface `TrainingEngine`.

Nothing else in the package imports DeepSpeed (tests/test_house.py). These modules import none of
our other packages: what they need of the model and the config is passed as arguments.
"""

from __future__ import annotations

from importlib.util import find_spec

DEEPSPEED, TORCH = "deepspeed", "torch"


def chosen_backend(name: str | None) -> str:
    """The config's `training_backend`; where it is not set, DeepSpeed if it is installed."""
    return name or (DEEPSPEED if find_spec("deepspeed") else TORCH)
