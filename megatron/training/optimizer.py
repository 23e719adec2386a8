"""Which parameters are decayed, and the optimizers by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.optim import Optimizer

DECAYED, PLAIN = "decayed", "plain"


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """Matrices are decayed; biases, norms and kernel parameters never are.

    Two groups, never more: ZeRO takes the norm of each group over all pipeline stages, so every
    stage must have the same ones, and only the first has a kernel.
    """
    members: dict[str, list[nn.Parameter]] = {DECAYED: [], PLAIN: []}
    for _, parameter in named_parameters:
        kernel = getattr(parameter, "is_kernel_parameter", False)
        members[DECAYED if parameter.dim() >= 2 and not kernel else PLAIN].append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": weight_decay if name == DECAYED else 0.0,
            "name": name,
        }
        for name, parameters in members.items()
        if parameters
    ]


def build_optimizer(
    kind: str,
    groups: list[dict[str, Any]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> torch.optim.Optimizer:
    """The optimizer named in the config (decoupled weight decay, as GPT-NeoX's Adam)."""
    optimizer_class, options = _choose(kind, lr=lr, betas=betas, eps=eps)
    if not optimizer_class.__module__.startswith("deepspeed."):
        return optimizer_class(groups, **options)
    try:  # DeepSpeed compiles its own at first use, which takes some minutes
        return optimizer_class(groups, **options)
    except Exception as error:  # whatever compilers and their tools raise
        raise ValueError(
            f"optimizer.type {kind}: DeepSpeed could not build its {optimizer_class.__name__} here "
            f"({error}). Install a C++ compiler (for GPUs also nvcc), or set optimizer.type: Adam"
        ) from error


def _choose(
    kind: str, *, lr: float, betas: tuple[float, float], eps: float
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    adam = {"lr": lr, "betas": betas, "eps": eps}
    name = kind.lower()
    if name in ("adam", "adamw"):
        fused = _apex_adam() if get_accelerator().device_name() == "cuda" else None
        if fused is not None:
            return fused, {**adam, "adam_w_mode": True}
        return torch.optim.AdamW, {**adam, "fused": True}
    if name == "fused_adam":
        from deepspeed.ops.adam import FusedAdam

        return FusedAdam, {**adam, "adam_w_mode": True}
    if name == "cpu_adam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam, {**adam, "adamw_mode": True}
    if name == "cpu_torch_adam":
        return torch.optim.AdamW, adam
    if name == "sgd":
        return torch.optim.SGD, {"lr": lr, "momentum": betas[0]}
    raise ValueError(
        f"optimizer.type {kind!r} is not implemented; use Adam, AdamW, fused_adam, cpu_adam, "
        "cpu_torch_adam or SGD"
    )


def _apex_adam() -> type[torch.optim.Optimizer] | None:
    try:
        from apex.optimizers import FusedAdam
    except ImportError:
        return None
    fused: type[torch.optim.Optimizer] = FusedAdam
    return fused


# Learning-rate schedules: a linear warmup, then a decay to the minimum.

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
