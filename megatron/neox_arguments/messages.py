"""pydantic's findings in the words of a config file."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


def describe_validation_error(error: ValidationError, group: type[BaseModel]) -> list[str]:
    """One line per problem: key, value, what was expected, what the key is for."""
    return [_describe(item, group) for item in error.errors(include_url=False)]


def _describe(item: Any, group: type[BaseModel]) -> str:
    location = [str(part) for part in item["loc"]]
    key = ".".join(location)
    if item["type"] == "missing":
        doc = group.model_fields[location[0]].description if len(location) == 1 else ""
        return f"{key} is missing. {doc} Add `{key}: ...` to one of the files.".replace("  ", " ")
    if item["type"] == "extra_forbidden":
        return _unknown_nested(location, group)
    message = item["msg"].replace("Input should be", "it should be")
    field = group.model_fields.get(location[0])
    doc = f" ({location[0]}: {field.description})" if field and field.description else ""
    return f"{key} = {item['input']!r:.80} is wrong: {message}.{doc}"


def _unknown_nested(location: Sequence[str], group: type[BaseModel]) -> str:
    parent: type[BaseModel] | None = group
    for part in location[:-1]:
        parent = _nested_model(parent, part) if parent else None
    names = list(parent.model_fields) if parent else []
    close = get_close_matches(location[-1], names, n=1)
    hint = f"Did you mean {close[0]}?" if close else f"Keys here: {', '.join(names)}."
    return f"unknown key {'.'.join(location)!r:.120}. {hint}"


def _nested_model(group: type[BaseModel], key: str) -> type[BaseModel] | None:
    field = group.model_fields.get(key)
    if field is None:
        return None
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
