"""KERPLE-NeoX: language models that work beyond their training length."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.engines import attention
    from megatron.generation.pretrained import load_pretrained

__all__ = ["__version__", "attention", "load_pretrained"]
__version__ = "0.1.0"


# The public names and where they live, loaded on first use: importing the package alone must not
# import torch.
_HOMES = {
    "attention": "megatron.engines",
    "load_pretrained": "megatron.generation.pretrained",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
