"""Several files become one config.

Plain files must agree: the same key with two values is an error that names both files. Files after
`--override` and values of `--set` are layers on top: they win, and mappings merge key by key. A
later plain file wins too if its only key is `seq_length_val`, or if it holds one key and lies in a
folder `lengths`: the official fork evaluates with `ex_eval.yml lengths/length_16384.yml`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError
from megatron.neox_arguments.normalize import NESTED_BLOCKS, normalize
from megatron.neox_arguments.trust import allow_kernel, kernels_in, without_code
from megatron.neox_arguments.values import copy_plain
from megatron.neox_arguments.yaml_files import parse_yaml, read_text


@dataclass(frozen=True)
class Layer:
    """Canonical values and where they came from."""

    source: str
    values: dict[str, Any]
    text: str = ""
    problems: tuple[str, ...] = ()


def read_layer(path: str | Path, known: list[str]) -> Layer:
    """One YAML file."""
    text = read_text(path)
    source = str(path)
    parsed = parse_yaml(text, source)
    plain = copy_plain({} if parsed is None else parsed, source)
    problems: list[str] = []
    values = normalize(plain, known, source, problems)
    return Layer(source, without_code(path, values), text, tuple(problems))


def parse_set(assignment: str, known: list[str]) -> Layer:
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
    if len(parts) > 1 and parts[0].replace("-", "_") not in NESTED_BLOCKS | _FREE_BLOCKS:
        raise ConfigError(f"{source}: {parts[0][:80]} has no keys inside it; write {parts[0]}=...")
    for part in reversed(parts):
        value = {part: value}
    problems: list[str] = []
    values = normalize(copy_plain(value, source), known, source, problems)
    allow_kernel(kernels_in(values))
    return Layer(source, values, problems=tuple(problems))


_FREE_BLOCKS = frozenset({"data_types", "flops_profiler", "comms_logger", "deepspeed_extra_args"})


def merge(base: Sequence[Layer], overrides: Sequence[Layer]) -> dict[str, Any]:
    """Plain layers, which must agree, then override layers in order."""
    merged = _merge_equals(base)
    _refuse_two_precisions([layer for layer in overrides if layer.source.startswith("--set ")])
    for layer in overrides:
        merged = _apply_override(merged, layer.values)
    return merged


def _merge_equals(layers: Sequence[Layer]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    conflicts = []
    for layer in layers:
        for key, value in layer.values.items():
            if key in merged and merged[key] != value and not _is_length_overlay(layer):
                conflicts.append(
                    f"{key} is {_short(merged[key])} in {origin[key]} and {_short(value)} in "
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


def _short(value: Any) -> str:
    return f"{value!r:.80}"


def _apply_override(below: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    merged = _forget_other_precisions(below, values)
    for key, value in values.items():
        merged[key] = _deep_merge(merged.get(key), value)
    return merged


def _deep_merge(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return {**below, **{key: _deep_merge(below.get(key), item) for key, item in above.items()}}


def _refuse_two_precisions(assigned: Sequence[Layer]) -> None:
    """Of two files the later may win; two assignments of one command are a slip."""
    chosen = {name: layer for layer in assigned for name in _enabled_blocks(layer.values)}
    if len(chosen) > 1:
        raise ConfigError(
            f"{' and '.join(layer.source for layer in chosen.values())} choose "
            f"{' and '.join(chosen)} at once. Keep one, e.g. --set precision={next(iter(chosen))}."
        )


def _enabled_blocks(values: dict[str, Any]) -> set[str]:
    return {
        name
        for name in ("fp16", "bf16")
        if isinstance(values.get(name), dict) and values[name].get("enabled", True) is True
    }


def _enabled_precisions(values: dict[str, Any]) -> set[str]:
    enabled = _enabled_blocks(values)
    if values.get("precision") is not None:
        enabled.add(str(values["precision"]))
    return enabled


def _forget_other_precisions(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`--set precision=fp32` on a bf16 file must not need a second --set to disable bf16."""
    result = dict(below)
    enabled = _enabled_precisions(above)
    if not enabled:
        return result
    result.pop("precision", None)
    for name in ("fp16", "bf16"):
        if name not in enabled:
            result.pop(name, None)
    return result
