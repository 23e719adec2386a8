"""Value types of config fields: strict, except where YAML gives no choice.

YAML reads `5e4` as a float and `[1, 2]` as a list; a whole float is accepted where an integer is
asked for. A quoted "12" or a `true` is not: it is more often a slip than a wish.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

LARGEST_INTEGER = 2**62


def _whole_float_to_int(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _zero_or_one_to_bool(value: Any) -> Any:
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    return value


def _comma_text_to_list(value: Any) -> Any:
    """`--set eval_lengths=128,256` arrives as text; `128` alone as an integer."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
        return [int(part) if part.lstrip("-").isdigit() else part for part in parts if part]
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    return list(value) if isinstance(value, tuple) else value


def _text_to_list(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    return list(value) if isinstance(value, tuple) else value


Int = Annotated[
    int, BeforeValidator(_whole_float_to_int), Field(ge=-LARGEST_INTEGER, le=LARGEST_INTEGER)
]
PositiveInt = Annotated[int, BeforeValidator(_whole_float_to_int), Field(gt=0, le=LARGEST_INTEGER)]
NonNegativeInt = Annotated[
    int, BeforeValidator(_whole_float_to_int), Field(ge=0, le=LARGEST_INTEGER)
]
NonNegativeFloat = Annotated[float, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Flag = Annotated[bool, BeforeValidator(_zero_or_one_to_bool)]
PositiveIntList = Annotated[list[PositiveInt], BeforeValidator(_comma_text_to_list)]
TextList = Annotated[list[str], BeforeValidator(_text_to_list)]
WeightList = Annotated[list[NonNegativeFloat], BeforeValidator(_text_to_list)]

NO_EFFECT: dict[str, Any] = {"effect": "none"}
"""Marks a field that is accepted for old files only; the reference page says so."""


class Group(BaseModel):
    """Base of every config group and of every nested mapping: frozen, strict, no extra keys."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        validate_default=True,
    )
