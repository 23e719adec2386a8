"""Writing YAML that reads back as the same values."""

from __future__ import annotations

from typing import Any

import yaml

from .plain_data import copy_plain


class _Dumper(yaml.SafeDumper):
    """One line per value, in a form that every YAML reader understands."""


def _represent_float(dumper: _Dumper, value: float) -> yaml.ScalarNode:
    """YAML 1.1 readers take `1e-05` for text; `1.0e-05` is a number to all of them."""
    text = repr(value)
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


def _represent_text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    style = None if value.isprintable() and value else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(float, _represent_float)
_Dumper.add_representer(str, _represent_text)


def dump_yaml(values: dict[str, Any]) -> str:
    """One `key: value` per line; nested values in flow style."""
    lines = [f"{key}: {_flow(value)}\n" for key, value in copy_plain(values, "config").items()]
    return "".join(lines)


def _flow(value: Any) -> str:
    # A list around the value keeps scalars from ending in YAML's document mark.
    text = yaml.dump(
        [value],
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=True,
        allow_unicode=True,
        width=float("inf"),
    )
    return text.strip()[1:-1]
