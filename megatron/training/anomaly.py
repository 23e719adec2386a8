"""Find the first layer whose output, or whose gradient, is not finite."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class NonFiniteError(RuntimeError):
    """A layer produced NaN or infinity."""


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _check(name: str, what: str, value: Any) -> None:
    for tensor in _tensors(value):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise NonFiniteError(f"detect_anomaly: the {what} of {name} is not finite")


def _after_forward(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
    _check(name, f"output ({type(module).__name__})", output)


def _after_backward(name: str, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
    _check(name, f"gradient ({type(module).__name__})", grad_output)


def watch(module: nn.Module) -> None:
    """Check every leaf layer of `module` in forward and backward; slow, for debugging."""
    for name, part in module.named_modules():
        if next(part.children(), None) is None:
            part.register_forward_hook(partial(_after_forward, name or type(part).__name__))
            part.register_full_backward_hook(partial(_after_backward, name or type(part).__name__))
