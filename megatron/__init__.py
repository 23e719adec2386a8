"""KERPLE-NeoX: language models that work beyond their training length."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.engines import attention
    from megatron.generation.pretrained import load_pretrained
    from megatron.model.position_names import kernel

__all__ = ["__version__", "attention", "kernel", "load_pretrained"]
__version__ = "0.1.0"

_HOMES = {
    "attention": "megatron.engines",
    "kernel": "megatron.model.position_names",
    "load_pretrained": "megatron.generation.pretrained",
}


def __getattr__(name: str) -> Any:
    """The public functions on first use: importing the package must not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "load_pretrained":  # the one that stands on DeepSpeed
        from megatron.machine import settle_accelerator

        settle_accelerator()
    found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
