"""Value types of config fields: strict, except where YAML gives no choice.

YAML reads `5e4` as a float and `[1, 2]` as a list; a whole float is accepted where an integer is
asked for. A quoted "12" or a `true` is refused: it is usually a mistake.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from megatron.errors import ConfigError


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


Int = Annotated[int, BeforeValidator(_whole_float_to_int), Field(le=2**62)]
PositiveInt = Annotated[Int, Field(gt=0)]
NonNegativeInt = Annotated[Int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
PositiveNumber = Annotated[float, Field(gt=0), AfterValidator(_whole_float_to_int)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Flag = Annotated[bool, BeforeValidator(_zero_or_one_to_bool)]
NonNegativeIntList = Annotated[list[NonNegativeInt], BeforeValidator(_comma_text_to_list)]
PositiveIntList = Annotated[list[PositiveInt], BeforeValidator(_comma_text_to_list)]
TextList = Annotated[list[str], BeforeValidator(_text_to_list)]
WeightList = Annotated[list[NonNegativeFloat], BeforeValidator(_text_to_list)]


Changes = Literal[
    "model", "training", "execution", "evaluation", "generation", "logging", "nothing"
]
"""What another value of a config key changes.

model       the function that a checkpoint's weights compute: part of the checkpoint's identity
training    the weights that a run ends with
execution   where, how fast and with which files it runs: the same numbers, up to rounding
evaluation  what is measured
generation  what is sampled
logging     what is printed and recorded
nothing     accepted for old files only
"""


def key(default: Any, meaning: str, **facts: Any) -> Any:
    """Declares a config key: its default (`...`: it must be given), its meaning, and further facts.

    changes     what it changes (see `Changes`), where that is not what its group changes
    resume      "free": a resumed run may set it differently, "same": it may not; by default keys
                that change the model or the training are "same", all others "free"
    evaluate    "free": evaluation and generation may set it differently from the checkpoint
    hf          its name in a Hugging Face config of ours (default: the same name; None: not there)
    hf_default  its default there, where that is not the one here
    ours        neither GPT-NeoX nor the official KERPLE code knows it
    layer       an entry of layer_pattern may set it for its layers
    refused     a flag of GPT-NeoX's that may not be true here, and why
    path        files, which may move between a run and its resumption
    schedule    part of the learning-rate schedule, of which a resumed run may choose another
    """
    known = {"changes", "resume", "evaluate", "hf", "hf_default", "ours", "layer", "refused"}
    known |= {"path", "schedule"}
    if unknown := set(facts) - known:
        raise TypeError(f"key() has no argument {', '.join(unknown)}")
    return Field(default, description=meaning, json_schema_extra=facts or None)


def accepted(reason: str) -> Any:
    """A flag of old files that has no effect, and why it needs none."""
    return key(False, f"Accepted for old files: {reason}", hf=None, changes="nothing")


def facts_of(field: FieldInfo) -> dict[str, Any]:
    """The facts that `key` was given beside default and meaning."""
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def declared(fact: str, *groups: type[BaseModel]) -> dict[str, Any]:
    """The keys of these groups whose declaration states this fact -> what it states."""
    return {
        name: facts_of(field)[fact]
        for group in groups
        for name, field in group.model_fields.items()
        if fact in facts_of(field)
    }


class Group(BaseModel):
    """Base of every config group and of every nested mapping: frozen, strict, no extra keys."""

    changes: ClassVar[Changes] = "training"
    """What keys of this group change, unless their declaration states another."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        validate_default=True,
    )


# Config values are plain data: nested mappings and lists of text, numbers, booleans and null.

MAX_DEPTH = 16
MAX_NODES = 100_000


def copy_plain(values: Any, source: str) -> dict[str, Any]:
    """A deep copy of a mapping of plain data; ConfigError for anything else."""
    if not isinstance(values, dict):
        raise ConfigError(
            f"{source}: a config is a mapping of keys to values, this is a "
            f"{type(values).__name__}. Write lines like `train_iters: 1000`."
        )
    copied = _copy(values, source, "config", 0, count(1))
    assert isinstance(copied, dict)
    return copied


def _copy(value: Any, source: str, where: str, depth: int, nodes: Iterator[int]) -> Any:
    place = f"{source}: {where[:80]}"
    if depth > MAX_DEPTH:
        raise ConfigError(f"{place} is nested more than {MAX_DEPTH} levels deep.")
    if next(nodes) > MAX_NODES:
        raise ConfigError(f"{source}: more than {MAX_NODES} values; is this a config?")
    if isinstance(value, dict):
        copied = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(
                    f"{source}: {key!r:.80} in {where[:80]} is not a text key; quote it."
                )
            name = _text(key, source, where)
            copied[name] = _copy(item, source, f"{where}.{key}", depth + 1, nodes)
        return copied
    if isinstance(value, list | tuple):
        return [
            _copy(item, source, f"{where}[{index}]", depth + 1, nodes)
            for index, item in enumerate(value)
        ]
    if isinstance(value, str):
        return _text(value, source, where)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value)
    if not isinstance(value, int):
        raise ConfigError(
            f"{place} is a {type(value).__name__}; only text, numbers, booleans, null, lists and "
            "mappings are allowed."
        )
    if abs(value) > 2**63:
        raise ConfigError(f"{place} is a number beyond 64 bits.")
    return int(value)


def _text(value: str, source: str, where: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{source}: {ascii(where)[:80]} holds characters that are not Unicode text."
        ) from error
    return str(value)
