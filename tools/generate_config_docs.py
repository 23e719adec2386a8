"""Write docs/neox_arguments.md from the fields of the config groups.

python tools/generate_config_docs.py          write the page
python tools/generate_config_docs.py --check  fail if the page is out of date
"""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from _start import start_main

# isort: split
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron.neox_arguments import GROUPS
from megatron.neox_arguments.catalogue import METHODS, Method
from megatron.neox_arguments.foreign_keys import ALIASES, UNIMPLEMENTED

PAGE = Path(__file__).resolve().parent.parent / "docs" / "neox_arguments.md"
INTRODUCTION = """# Config keys

Generated from the fields in `megatron/neox_arguments/` by `tools/generate_config_docs.py`;
do not edit. How files merge, `--override`, `--set` and what differs from GPT-NeoX:
[configuration.md](configuration.md). Keys may be written with hyphens or underscores. In code a key
is found in its group: `args.model.num_layers`.
"""


def type_name(annotation: Any) -> str:
    """`int`, `list of float`, `a or b` for a field's annotation."""
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        named = [type_name(item) for item in arguments if item is not type(None)]
        return " or ".join(named)
    if hasattr(annotation, "__metadata__"):
        return type_name(arguments[0])
    if origin is list:
        return "list" if arguments[0] is Any else f"list of {type_name(arguments[0])}"
    if origin is tuple:
        return f"{len(arguments)} numbers"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "mapping"
    return {"str": "text", "float": "number", "int": "integer", "bool": "true or false"}.get(
        getattr(annotation, "__name__", ""), str(annotation)
    )


def default_text(field: FieldInfo) -> str:
    """The default as it would be written in YAML."""
    if field.is_required():
        return "required"
    value = field.default
    if isinstance(value, BaseModel):
        return "see below"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return '`"' + value.replace("\n", "\\n") + '"`'
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def field_lines(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Table rows of a group, nested mappings in place."""
    lines = []
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra
        silent = isinstance(extra, dict) and extra.get("effect") == "none"
        description = (field.description or "").replace("|", "\\|")
        lines.append(
            f"| `{prefix}{name}` | {type_name(field.annotation)} | {default_text(field)} | "
            f"{'(no effect) ' if silent else ''}{description} |"
        )
        nested = nested_model(field.annotation)
        if nested is not None:
            lines += field_lines(nested, f"{prefix}{name}.")
    return lines


def nested_model(annotation: Any) -> type[BaseModel] | None:
    """The mapping type inside an annotation, if there is one."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def render() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for name, group in GROUPS.items():
        summary = (group.__doc__ or "").strip()
        table = ["| key | type | default | meaning |", "|---|---|---|---|", *field_lines(group)]
        parts.append(f"## {name}\n\n{summary}\n\n" + "\n".join(table) + "\n")
    parts.append(_positions_section())
    parts.append(_aliases_section())
    parts.append(_foreign_section())
    return "\n".join(parts)


def _positions_section() -> str:
    head = [
        "| pos_emb | label | official KERPLE name | learned per head | what it is |",
        "|---|---|---|---|---|",
    ]
    rows = [_position_row(entry) for entry in METHODS.values()]
    return "## Values of pos_emb\n\n" + "\n".join([*head, *rows]) + "\n"


def _position_row(entry: Method) -> str:
    official = f"`{entry.official}`" if entry.official else ""
    learned = "" if entry.count else str(entry.per_head)
    formula = f": ${entry.formula}$" if entry.formula else ""
    return f"| `{entry.name}` | {entry.label} | {official} | {learned} | {entry.summary}{formula} |"


def _aliases_section() -> str:
    rows = [f"- `{old}` is `{new}`" for old, new in ALIASES.items()]
    return "## Old names\n\n" + "\n".join(rows) + "\n"


def _foreign_section() -> str:
    features: dict[str, list[str]] = {}
    for key, (feature, _) in UNIMPLEMENTED.items():
        features.setdefault(feature, []).append(f"`{key}`")
    rows = [f"- {feature}: {', '.join(keys)}" for feature, keys in features.items()]
    return (
        "## GPT-NeoX keys that are not implemented\n\n"
        "They load when they switch their feature off and are an error otherwise.\n\n"
        + "\n".join(rows)
        + "\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if the page is out of date")
    options = parser.parse_args(argv)
    text = render()
    if options.check:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE} is out of date: run python tools/generate_config_docs.py", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    start_main(main)
