"""An optimizer as a user writes one: two states, a step count in an int, an option of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class SlowMomentum(Optimizer):
    """Momentum, and a slow copy of the weights that pulls them back."""

    def __init__(self, params: Any, lr: float, pull: float = 0.1, third: bool = False) -> None:
        super().__init__(params, {"lr": lr, "pull": pull, "third": third})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["steps_taken"] = 0
                    state["buffer"] = torch.zeros_like(parameter)
                    state["slow"] = parameter.detach().clone()
                    if group["third"]:
                        state["unused"] = torch.zeros_like(parameter)
                state["steps_taken"] += 1
                state["buffer"].mul_(0.8).add_(parameter.grad)
                rate = group["lr"] / (1 + 0.1 * state["steps_taken"])
                parameter.sub_(state["buffer"], alpha=rate)
                parameter.lerp_(state["slow"], group["pull"])
                state["slow"].lerp_(parameter, 0.5)
