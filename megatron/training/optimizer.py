"""Weight-decay groups, learning-rate schedules, and the kernel's own rate and decay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megatron.backends.interface import Span, TrainingEngine, full_shape
from megatron.backends.optimizers import LINEAR
from megatron.mpu.parallel_layers import parameter_facts


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    *,
    linear_apart: bool = False,
) -> list[dict[str, Any]]:
    """Weight decay applies to matrices, not to biases and norms; kernels have their own rule.

    Exactly two groups: ZeRO computes each group's norm over all pipeline stages, so every stage
    must have the same groups, and only the first has a kernel. `linear_apart` makes a third, of the
    matrices of linear layers, for Muon, which ZeRO does not step.
    """
    linear: dict[str, Any] = {"params": [], "weight_decay": weight_decay, "name": LINEAR}
    decayed: dict[str, Any] = {"params": [], "weight_decay": weight_decay, "name": "decayed"}
    plain: dict[str, Any] = {"params": [], "weight_decay": 0.0, "name": "plain"}
    for _, parameter in named_parameters:
        facts, shape = parameter_facts(parameter), full_shape(parameter)
        if linear_apart and facts.is_linear(shape):
            linear["params"].append(parameter)
        else:
            (decayed if facts.is_decayed(shape) else plain)["params"].append(parameter)
    return [group for group in (linear, decayed, plain) if group["params"]]


# Learning-rate schedules: GPT-NeoX's rule, the official KERPLE fork's, and our first one.
#
# `step` is the number of optimizer steps already taken, so the first step has the rate of step 0.
# GPT-NeoX's and the fork's warmup need not be a whole number of steps (1% of 150 steps is 1.5).

HALVING = 0.693
"""The exponential decay halves the rate: both code bases write ln 2 with three digits."""


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a function of the steps taken."""

    peak: float
    minimum: float
    warmup_steps: float
    decay_steps: int
    style: str
    rule: str = "neox"
    wsd_steps: int = 0
    """`wsd`: how many of the steps before decay_steps the decay takes."""
    wsd_style: str = "linear"

    def __call__(self, step: int) -> float:
        """The rate of the step that follows `step` steps."""
        if self.style == "wsd":
            return wsd_rate(self, step)
        return RULES[self.rule](self, step)

    def rises_again(self, last_step: int) -> bool:
        """Whether the rate grows after the decay: GPT-NeoX's cosine does, past its end."""
        return self.rule == "neox" and self.style == "cosine" and last_step > self.decay_steps + 1


def neox_rate(schedule: Schedule, step: int) -> float:
    """GPT-NeoX: the decay begins after warmup and ends at decay_steps."""
    peak, warmup = schedule.peak, schedule.warmup_steps
    if warmup > 0 and step <= warmup:
        return peak * max(1, step) / warmup
    done, end = step - warmup, (schedule.decay_steps - warmup) or 1
    return max(_decayed(schedule, done, end, schedule.minimum), schedule.minimum)


def wsd_rate(schedule: Schedule, step: int) -> float:
    """Warmup as in GPT-NeoX, the peak, and from decay_steps - wsd_steps on a decay to the minimum.

    The formulas of the decay are Megatron-LM's; `lr_decay_rule` does not change them.
    """
    peak, least, warmup = schedule.peak, schedule.minimum, schedule.warmup_steps
    if warmup > 0 and step <= warmup:
        return peak * max(1, step) / warmup
    done = (step - (schedule.decay_steps - schedule.wsd_steps)) / schedule.wsd_steps
    left = WSD_DECAYS[schedule.wsd_style](min(max(done, 0.0), 1.0))
    return least + left * (peak - least)


WSD_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "exponential": lambda done: 2.0 * 0.5**done - 1.0,
    "minus_sqrt": lambda done: 1.0 - math.sqrt(done),
}


def kerple_rate(schedule: Schedule, step: int) -> float:
    """The official fork: the first step has rate 0, and the decay stops warmup steps before 0."""
    peak, warmup, end = schedule.peak, schedule.warmup_steps, schedule.decay_steps
    counted = min(step, end - warmup)
    if warmup > 0 and step <= warmup:
        return peak * counted / warmup
    return max(_decayed(schedule, counted - warmup, end, 0.0), schedule.minimum)


def _decayed(schedule: Schedule, done: float, end: float, cosine_end: float) -> float:
    """The rate when `done` of `end` steps of decay are over."""
    peak = schedule.peak
    if schedule.style == "cosine":
        return cosine_end + (peak - cosine_end) / 2.0 * (math.cos(math.pi * done / end) + 1)
    if schedule.style == "linear":
        return peak * (end - done) / end
    if schedule.style == "exponential":
        return peak * math.exp(-HALVING * done / end)
    return peak  # constant


def earlier_rate(schedule: Schedule, step: int) -> float:
    """This library before it had `lr_decay_rule`: every style ends at the minimum."""
    warmup = int(schedule.warmup_steps)
    if step < warmup:
        return schedule.peak * (step + 1) / warmup
    if step >= schedule.decay_steps and schedule.style != "constant":
        return schedule.minimum
    done = (step - warmup) / max(schedule.decay_steps - warmup, 1)
    left = EARLIER_DECAYS[schedule.style](done)
    return schedule.minimum + left * (schedule.peak - schedule.minimum)


EARLIER_DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": WSD_DECAYS["linear"],
    "cosine": WSD_DECAYS["cosine"],
    "exponential": lambda done: math.exp(-5.0 * done),
}

RULES: dict[str, Callable[[Schedule, int], float]] = {
    "neox": neox_rate,
    "kerple": kerple_rate,
    "earlier": earlier_rate,
}
"""`lr_decay_rule` -> the rate."""


class Scheduler:
    """Sets the rate of every parameter group; DeepSpeed steps it and saves its state."""

    def __init__(
        self, optimizer: Optimizer, schedule: Schedule, *, keep_saved: bool = False
    ) -> None:
        """`keep_saved`: a loaded state brings its own schedule, not only the step."""
        self.optimizer = optimizer
        self.schedule = schedule
        self.keep_saved = keep_saved
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
        return {"steps": self.steps, "schedule": asdict(self.schedule)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = int(state["steps"])
        if self.keep_saved and "schedule" in state:
            self.schedule = replace(self.schedule, **state["schedule"])
        self._apply()

    def _apply(self) -> None:
        rate = self.schedule(self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate


# `kerple_lr_scale` and `kerple_weight_decay`: the kernel's own learning rate and decay.
#
# They are no parameter group: ZeRO needs the same groups on every pipeline stage, and only the
# first has a kernel; and the groups of existing checkpoints would change. Instead the kernel's
# parameters are corrected after the optimizer's step: an update u of x at learning rate r becomes
# scale * (u - r * decay * x).


def scale_kernel_steps(engine: TrainingEngine, *, scale: float, decay: float) -> None:
    """Make every step of the engine's optimizer move kernels by their own rate and decay."""
    if scale == 1.0 and decay == 0.0:
        return
    spans = {id(master): _kernel_spans(held) for master, held in engine.master_spans()}
    before: list[tuple[Tensor, Tensor, float]] = []

    def note(optimizer: Optimizer, *_: Any) -> None:
        # ZeRO steps one group at a time, so the stepped parameters are known only here.
        before[:] = [
            (piece, piece.clone(), float(group["lr"]))
            for group in optimizer.param_groups
            for master in group["params"]
            for piece in (master.detach().view(-1)[a:b] for a, b in spans.get(id(master), []))
        ]

    @torch.no_grad()
    def correct(*_: Any) -> None:
        for piece, old, rate in before:
            piece.copy_(old + scale * (piece - old - rate * decay * old))

    engine.optimizer.register_step_pre_hook(note)
    engine.optimizer.register_step_post_hook(correct)


def _kernel_spans(held: list[Span]) -> list[tuple[int, int]]:
    """Ranges of the kernel's elements in one of the optimizer's tensors."""
    return [
        (start, stop)
        for parameter, start, stop, _ in held
        if parameter_facts(parameter).rate == "kernel" and stop > start
    ]
