"""From `optimizer.type` to an optimizer: the known names, Lion, Muon, and user-defined classes.

A user-defined class needs no other file: `optimizer: {type: package.module:Class, params: {}}`.
Its state is saved, resumed, resharded (`optimizer_states`) and counted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megatron.backends.deepspeed_processes import compiled_adam
from megatron.errors import ConfigError


def build_optimizer(
    kind: str | type,
    groups: list[dict[str, Any]],
    params: Mapping[str, Any],
    *,
    on_gpu: bool = False,
) -> Optimizer:
    """`kind` is a known name or a class; weight decay is decoupled, as in GPT-NeoX's Adam."""
    if not isinstance(kind, str):
        return _build_own(kind, groups, params)
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=params["lr"], momentum=params.get("momentum", 0.0))
    if kind == "lion":
        return Lion(groups, lr=params["lr"], betas=params["betas"])
    if kind == "muon":
        return Muon(groups, **params)
    adam = {name: params[name] for name in ("lr", "betas", "eps")}
    if kind == "adam8bit":
        return _adam_8bit(groups, adam)
    if kind == "cpu_torch_adam":
        return torch.optim.AdamW(groups, **adam)
    if kind in ("fused_adam", "cpu_adam"):
        return _compiled_adam(kind, groups, adam)
    if on_gpu:
        try:
            from apex.optimizers import FusedAdam
        except ImportError:
            pass
        else:
            fused: Optimizer = FusedAdam(groups, adam_w_mode=True, **adam)
            return fused
    return torch.optim.AdamW(groups, **adam, fused=True)


def _adam_8bit(groups: list[dict[str, Any]], adam: dict[str, Any]) -> Optimizer:
    try:
        from bitsandbytes.optim import Adam8bit
    except ImportError as error:
        raise ConfigError(
            "use_bnb_optimizer = true needs the package bitsandbytes, which is not installed: "
            "pip install bitsandbytes, or set it to false."
        ) from error
    optimizer: Optimizer = Adam8bit(groups, **adam)
    return optimizer


def _compiled_adam(kind: str, groups: list[dict[str, Any]], adam: dict[str, Any]) -> Optimizer:
    try:
        optimizer: Optimizer = compiled_adam(kind, groups, **adam)
    except Exception as error:  # whatever compilers and their tools raise
        raise ConfigError(
            f"optimizer.type {kind}: DeepSpeed could not build it here ({error}). Install a C++ "
            "compiler (for GPUs also nvcc), or set optimizer.type: Adam"
        ) from error
    return optimizer


def _build_own(kind: type, groups: list[dict[str, Any]], params: Mapping[str, Any]) -> Optimizer:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if not issubclass(kind, Optimizer):
        raise ConfigError(f"optimizer.type {name}: is not a torch.optim.Optimizer")
    accepted = inspect.signature(kind).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    if unknown := [key for key in params if key not in accepted and not takes_any]:
        raise ConfigError(
            f"optimizer.params.{unknown[0]}: {name} does not take it; it takes "
            f"{', '.join(list(accepted)[1:])}."
        )
    try:
        build: Callable[..., Optimizer] = kind
        return build(groups, **params)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.type {name}: cannot be built ({error})") from error


class Lion(Optimizer):
    """Lion (Chen et al., 2023): steps by the sign of a momentum, which is its only state."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """direction = sign(b1 m + (1 - b1) g);  x -= lr (direction + decay x);  m = b2 m + ..."""
        for group in self.param_groups:
            rate, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum: Tensor = state["exp_avg"]
                direction = torch.lerp(gradient, momentum, beta1).sign_()
                parameter.mul_(1 - rate * group["weight_decay"]).add_(direction, alpha=-rate)
                momentum.lerp_(gradient, 1 - beta2)


LINEAR = "linear"
"""The name of the group whose parameters are matrices of linear layers."""


class Muon(Optimizer):
    """torch's Muon for the matrices of linear layers, AdamW for the rest, as one optimizer.

    The rate of a matrix is adjusted to the size of AdamW's updates, so that one rate fits both.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        # They keep nothing themselves: their groups and states are this optimizer's.
        none = [nn.Parameter(torch.zeros(1, 1))]
        self._muon = torch.optim.Muon(none, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        self._adam = torch.optim.AdamW(none, betas=(betas[0], betas[1]), eps=eps)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer, is_muon in ((self._muon, True), (self._adam, False)):
            optimizer.state = self.state
            optimizer.param_groups = [
                {**optimizer.defaults, **group}
                for group in self.param_groups
                if (group.get("name") == LINEAR) is is_muon
            ]
            optimizer.step()


def measured_state_bytes(build: Callable[[list[dict[str, Any]]], Optimizer]) -> float:
    """Bytes of optimizer state per element of an fp32 matrix, measured after one step."""
    parameter = nn.Parameter(torch.zeros(64, 64))
    parameter.grad = torch.ones_like(parameter)
    optimizer = build([{"params": [parameter]}])
    optimizer.step()
    kept = [v for v in optimizer.state[parameter].values() if isinstance(v, Tensor) and v.dim()]
    return sum(value.numel() * value.element_size() for value in kept) / parameter.numel()
