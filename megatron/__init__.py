"""KERPLE-NeoX: language models that work beyond their training length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.generation.pretrained import load_pretrained

__all__ = ["__version__", "load_pretrained"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`load_pretrained` on first use: importing the package must not import torch."""
    if name == "load_pretrained":
        from megatron.generation.pretrained import load_pretrained

        return load_pretrained
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
