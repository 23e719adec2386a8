"""KERPLE-NeoX: language models that work beyond their training length."""

from __future__ import annotations

__version__ = "0.1.0"
