"""Learning-rate schedules: a linear warmup, then a decay to the minimum."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

# Each maps the share of the decay that is done, 0 to 1, to the share of (lr - min_lr) that is left.
DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "exponential": lambda done: math.exp(-5.0 * done),
}


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a function of the steps taken."""

    peak: float
    minimum: float
    warmup_steps: int
    decay_steps: int
    style: str

    def __call__(self, step: int) -> float:
        """The rate of the step that follows `step` steps."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if step >= self.decay_steps and self.style != "constant":
            return self.minimum
        span = max(self.decay_steps - self.warmup_steps, 1)
        left = DECAYS[self.style]((step - self.warmup_steps) / span)
        return self.minimum + left * (self.peak - self.minimum)


class Scheduler:
    """Sets the rate of every parameter group; DeepSpeed steps it and saves its state."""

    def __init__(self, optimizer: Optimizer, schedule: Schedule) -> None:
        self.optimizer = optimizer
        self.schedule = schedule
        self.steps = 0
        self._apply()

    def step(self, *_: Any, **__: Any) -> None:
        """Count one optimizer step and set the rate of the next."""
        self.steps += 1
        self._apply()

    def get_lr(self) -> list[float]:
        return [self.schedule(self.steps)]

    get_last_lr = get_lr

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = int(state["steps"])
        self._apply()

    def _apply(self) -> None:
        rate = self.schedule(self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
