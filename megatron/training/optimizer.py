"""Which parameters are decayed, and the optimizers by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

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
    return optimizer_class(groups, **options)


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
