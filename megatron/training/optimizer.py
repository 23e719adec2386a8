"""Which parameters are decayed, and the optimizers by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from megatron.mpu.parallel_layers import whole_shape

DECAYED, PLAIN = "decayed", "plain"


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """Matrices are decayed; biases and norms never are, kernels by a rule of their own.

    Two groups, never more: ZeRO takes the norm of each group over all pipeline stages, so every
    stage must have the same ones, and only the first has a kernel (see kernel_rate.py).
    """
    members: dict[str, list[nn.Parameter]] = {DECAYED: [], PLAIN: []}
    for name, parameter in named_parameters:
        kernel = getattr(parameter, "is_kernel_parameter", False)
        norm = ".qk_layernorm." in name  # of two dimensions: heads and their width
        decayed = len(whole_shape(parameter)) >= 2 and not kernel and not norm
        members[DECAYED if decayed else PLAIN].append(parameter)
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
