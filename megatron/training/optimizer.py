"""Optimizers that refuse a step with numbers that are not finite, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

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


def _all_finite(parameters: Iterable[Tensor]) -> Tensor:
    """1.0 if every gradient is finite, else 0.0, on the gradients' device."""
    gradients = [p.grad for p in parameters if p.grad is not None and p.grad.numel()]
    if not gradients:
        return torch.ones(())
    # A sum of norms is finite only if every element is; overflow of the norm itself in fp32 would
    # need gradients beyond 1e19, which no step survives either.
    norms = torch._foreach_norm([g.float() for g in gradients])
    return torch.isfinite(torch.stack(list(norms)).sum()).float()


class StepGuard:
    """Counts the steps that were refused because a gradient was not finite."""

    def __init__(self) -> None:
        self.skipped = 0
        self.consecutive = 0

    def allows(self, parameters: Iterable[Tensor]) -> bool:
        """Whether all ranks' gradients are finite; every rank gets the same answer."""
        finite = _all_finite(parameters)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        if finite.item():
            self.consecutive = 0
            return True
        self.skipped += 1
        self.consecutive += 1
        return False


def guarded(optimizer_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The same optimizer with a StepGuard: a step with bad gradients changes nothing."""

    class Guarded(optimizer_class):  # type: ignore[misc, valid-type]
        guard: StepGuard

        def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> Any:
            everyone = (p for group in self.param_groups for p in group["params"])
            if not self.guard.allows(everyone):
                return None
            return super().step(closure, **kwargs)

    Guarded.__name__ = optimizer_class.__name__
    return Guarded


def build_optimizer(
    kind: str,
    groups: list[dict[str, Any]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> tuple[torch.optim.Optimizer, StepGuard]:
    """The optimizer named in the config (decoupled weight decay, as GPT-NeoX's Adam)."""
    optimizer_class, options = _choose(kind, lr=lr, betas=betas, eps=eps)
    guarded_class = guarded(optimizer_class)
    guard = StepGuard()
    guarded_class.guard = guard  # type: ignore[attr-defined]
    return guarded_class(groups, **options), guard


def _choose(
    kind: str, *, lr: float, betas: tuple[float, float], eps: float
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    adam = {"lr": lr, "betas": betas, "eps": eps}
    name = kind.lower()
    if name in ("adam", "adamw"):
        if torch.cuda.is_available():
            try:
                from apex.optimizers import FusedAdam

                return FusedAdam, {**adam, "adam_w_mode": True}
            except ImportError:
                pass
        return torch.optim.AdamW, {**adam, "fused": True}
    if name in ("cpu_adam", "cpu_torch_adam"):
        return torch.optim.AdamW, adam
    if name == "sgd":
        return torch.optim.SGD, {"lr": lr, "momentum": betas[0]}
    raise ValueError(
        f"optimizer.type {kind!r} is not implemented; use Adam, AdamW, cpu_adam or SGD"
    )
