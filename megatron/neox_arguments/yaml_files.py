"""Safe YAML: reading, writing, and merging several files into one config."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron.errors import ConfigError
from megatron.neox_arguments.allowed_code import allow_kernel, classes_in, without_code
from megatron.neox_arguments.declared_keys import FREE_BLOCKS, NESTED_BLOCKS
from megatron.neox_arguments.deepspeed_config import optimizer_family
from megatron.neox_arguments.normalize import enabled_blocks, normalize
from megatron.neox_arguments.values import copy_plain

MAX_BYTES = 1_000_000


class _ConfigLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which also refuses duplicates and aliases and reads `1e-4`."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.YAMLError(
                f"line {event.start_mark.line + 1}: YAML aliases (*name) are not supported; "
                "write the value out"
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None:
                continue
            if key in seen and not _same_node(seen[key], value_node):
                raise yaml.YAMLError(
                    f"line {key_node.start_mark.line + 1}: key {key!r:.80} is given twice "
                    "with different values"
                )
            seen[key] = value_node
        return super().construct_mapping(node, deep=deep)


def _same_node(first: Any, second: Any) -> bool:
    if type(first) is not type(second) or first.tag != second.tag:
        return False
    if isinstance(first, yaml.ScalarNode):
        return bool(first.value == second.value)
    return yaml.serialize(first) == yaml.serialize(second)


# YAML 1.1 reads `1e-4` as text because it wants a dot; every user means a number. It also turns
# 2020-01-01 into a date and 12:30 into 750; here they stay text.
_FLOAT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$")
_REPLACED = {
    "tag:yaml.org,2002:float",
    "tag:yaml.org,2002:int",
    "tag:yaml.org,2002:timestamp",
    "tag:yaml.org,2002:merge",
    "tag:yaml.org,2002:value",
}
_ConfigLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_ConfigLoader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_ConfigLoader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text; ConfigError, naming `source`, whatever is wrong with it."""
    try:
        return yaml.load(text, Loader=_ConfigLoader)  # noqa: S506 - a subclass of SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {_one_line(error)}") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply to be a config.") from error
    except (ValueError, ArithmeticError, TypeError, LookupError, AttributeError) as error:
        # PyYAML's own constructors let these through for odd scalars such as `!!int x`.
        raise ConfigError(f"{source}: not valid YAML: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).replace('in "<unicode string>", ', "").split())
    text = text or type(error).__name__
    return text.encode("utf-8", "replace").decode("utf-8")[:300]


def read_text(path: str | Path) -> str:
    """The text of a config file; ConfigError when it cannot be read."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such config file. {_similar_files(Path(path))}") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path}: is a directory; name a .yml file inside it.") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path!s:.200}: cannot be read ({_one_line(error)}).") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: {len(data)} bytes is too large for a config file.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start}).") from error


def _similar_files(path: Path) -> str:
    from difflib import get_close_matches

    try:
        names = sorted(entry.name for entry in path.parent.glob("*.yml"))
    except OSError:
        names = []
    close = get_close_matches(path.name, names, n=1)
    if close:
        return f"Did you mean {path.parent / close[0]}?"
    return "Check the path, or give its directory with -d."


# Writing YAML that reads back as the same values.


class _Dumper(yaml.SafeDumper):
    """One line per value, in a form that every YAML reader understands."""


def _represent_float(dumper: _Dumper, value: float) -> yaml.ScalarNode:
    """YAML 1.1 readers take `1e-05` for text; `1.0e-05` is a number to all of them."""
    text = repr(value)
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


def _represent_text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    """Quoted where `1e-4` would be taken for the number that `_ConfigLoader` reads in it."""
    plain = value.isprintable() and value and not _FLOAT.match(value)
    style = None if plain else '"'
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


# Several files become one config.
#
# Plain files must agree: the same key with two values is an error that names both files. Files
# after `--override` and values of `--set` are layers on top: they win, and mappings merge key by
# key. A later plain file wins too if its only key is `seq_length_val`, or if it holds one key and
# is in a folder `lengths`: the official fork evaluates with `ex_eval.yml
# lengths/length_16384.yml`.


class Layer(NamedTuple):
    """Canonical values, where they came from, what is wrong with them, and a file's text."""

    source: str
    values: dict[str, Any]
    problems: list[str]
    text: str = ""


def read_layer(path: str | Path) -> Layer:
    """One YAML file."""
    text = read_text(path)
    source = str(path)
    parsed = parse_yaml(text, source)
    plain = copy_plain({} if parsed is None else parsed, source)
    values, problems = normalize(plain, source)
    return Layer(source, without_code(path, values), problems, text)


def parse_set(assignment: str) -> Layer:
    """`optimizer.params.lr=1e-4` as a layer of its own."""
    if not isinstance(assignment, str) or "=" not in assignment:
        raise ConfigError(
            f"--set {assignment!s:.80}: expected key=value, e.g. --set train_iters=100 or "
            "--set optimizer.params.lr=1e-4. Files go before --set."
        )
    dotted, text = assignment.split("=", 1)
    source = f"--set {dotted.strip()[:80]}"
    value = parse_yaml(text, source)
    parts = [part.strip() for part in dotted.split(".")]
    if not all(parts):
        raise ConfigError(f"{source}: empty key; expected key=value.")
    if len(parts) > 1 and parts[0].replace("-", "_") not in NESTED_BLOCKS | FREE_BLOCKS:
        raise ConfigError(f"{source}: {parts[0][:80]} has no keys inside it; write {parts[0]}=...")
    for part in reversed(parts):
        value = {part: value}
    values, problems = normalize(copy_plain(value, source), source)
    allow_kernel(classes_in(values))
    return Layer(source, values, problems)


def merge(base: Sequence[Layer], overrides: Sequence[Layer]) -> dict[str, Any]:
    """Plain layers, which must agree, then override layers in order."""
    merged = _merge_equals(base)
    _refuse_two_precisions([layer for layer in overrides if layer.source.startswith("--set ")])
    for layer in overrides:
        merged = _drop_other_precisions(merged, layer.values)
        merged = _drop_other_params(merged, layer.values)
        merged = _deep_merge(merged, layer.values)
    return merged


def _merge_equals(layers: Sequence[Layer]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    conflicts = []
    for layer in layers:
        for key, value in layer.values.items():
            if key in merged and merged[key] != value and not _is_length_overlay(layer):
                conflicts.append(
                    f"{key} is {merged[key]!r:.80} in {origin[key]} and {value!r:.80} in "
                    f"{layer.source}. Remove one, or give the file that should win after "
                    f"--override (or the value with --set {key}=...)."
                )
            merged[key] = value
            origin.setdefault(key, layer.source)
    if conflicts:
        raise ConfigError("\n".join(conflicts))
    return merged


def _is_length_overlay(layer: Layer) -> bool:
    in_folder = Path(layer.source).parent.name == "lengths"
    return len(layer.values) == 1 and ("seq_length_val" in layer.values or in_folder)


def _deep_merge(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return {**below, **{key: _deep_merge(below.get(key), item) for key, item in above.items()}}


def _refuse_two_precisions(assigned: Sequence[Layer]) -> None:
    """Of two files the later may win; two --set of one key are an error."""
    chosen = {name: layer for layer in assigned for name in enabled_blocks(layer.values)}
    if len(chosen) > 1:
        raise ConfigError(
            f"{' and '.join(layer.source for layer in chosen.values())} choose "
            f"{' and '.join(chosen)} at once. Keep one, e.g. --set precision={next(iter(chosen))}."
        )


def _drop_other_params(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`--set optimizer.type=lion` on a file with Adam's betas means Lion with its own defaults.

    The learning rate stays; it has no default of an optimizer.
    """
    old, new = (_optimizer_of(values) for values in (below, above))
    kinds = [str(block.get("type", "adam")).lower() for block in (old, new)]
    if "type" not in new or optimizer_family(kinds[0]) == optimizer_family(kinds[1]):
        return below
    params = old.get("params")
    kept = {"lr": params["lr"]} if isinstance(params, dict) and "lr" in params else {}
    return {**below, "optimizer": {**old, "params": kept}} if "params" in old else below


def _optimizer_of(values: dict[str, Any]) -> dict[str, Any]:
    block = values.get("optimizer")
    return block if isinstance(block, dict) else {}


def _drop_other_precisions(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`--set precision=fp32` on a bf16 file must not need a second --set to disable bf16."""
    chosen = enabled_blocks(above)
    if above.get("precision") is not None:
        chosen.append(str(above["precision"]))
    if not chosen:
        return below
    others = {"precision", "fp16", "bf16"}.difference(chosen)
    return {key: value for key, value in below.items() if key not in others}
