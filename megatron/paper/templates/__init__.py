"""The templates of pages, tables, batch scripts and shell completion, and how they are filled in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

FOLDER = Path(__file__).resolve().parent


def templates(**filters: Callable[..., str]) -> Environment:
    """All of them; only HTML is escaped, a shell's values are quoted by its filters."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= filters
    return environment
