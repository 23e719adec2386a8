"""No input makes the loader fail with anything but its own error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.errors import ConfigError
from megatron.launcher.environment import expand_hostlist
from megatron.neox_arguments import KNOWN_KEYS, NeoXArgs, decode_config
from megatron.neox_arguments.normalize import ALIASES, DERIVED, UNIMPLEMENTED
from tests.neox_arguments.samples import TINY

SETTINGS = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

NESTED_KEYS = ["enabled", "type", "params", "lr", "betas", "stage", "device", "fp16", "factor"]
keys = st.one_of(
    st.sampled_from([*KNOWN_KEYS, *ALIASES, *UNIMPLEMENTED, *DERIVED]),
    st.sampled_from(KNOWN_KEYS).map(lambda key: key.replace("_", "-")),
    st.text(max_size=8),
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=10),
    st.sampled_from(["bfloat16", "global", "all", "1,2,3", "none", "kerple_log", "a:b", ":"]),
    st.dates(),
    st.binary(max_size=4),
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(NESTED_KEYS) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


def load_or_config_error(load: Any) -> None:
    try:
        args = load()
    except ConfigError as error:
        assert str(error)
        return
    assert NeoXArgs.from_dict(args.to_dict()) == args
    args.to_yaml()
    args.config_hash()
    try:
        args.deepspeed_config(2)
    except ConfigError:
        return


@SETTINGS
@given(changes=st.dictionaries(keys, values, max_size=5))
def test_any_dict(changes: dict[str, Any]) -> None:
    load_or_config_error(lambda: NeoXArgs.from_dict({**TINY, **changes}))


@SETTINGS
@given(key=st.sampled_from([*KNOWN_KEYS, "save_interval"]), value=values)
def test_any_value_of_a_known_key(key: str, value: Any) -> None:
    load_or_config_error(lambda: NeoXArgs.from_dict({**TINY, key: value}))


@SETTINGS
@given(value=st.one_of(values, st.dictionaries(st.integers() | st.none(), st.none(), min_size=1)))
def test_anything_that_is_not_a_mapping_of_text(value: Any) -> None:
    load_or_config_error(lambda: NeoXArgs.from_dict(value))


@SETTINGS
@given(data=st.binary(max_size=200))
def test_any_bytes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bytes.yml"
    path.write_bytes(data)
    load_or_config_error(lambda: NeoXArgs.from_files([path]))


YAML_PIECES = [
    "{", "}", "[", "]", ":", ": ", ", ", "\n", "  ", "- ", "&a ", "*a", "!!int ", "!!float ",
    "!!set ", "!!omap ", "!!timestamp ", "!!null ", "? ", "| ", "> ", "'", '"', "\\", "#", "<<",
    "=", "0x", "1:2", "1e5", "._", ".inf", "seed", "optimizer", "fp16", "%YAML 9.9", "---",
    "...", "\t", "!!bool x", "!!merge ", "~", "\x00", "\ufeff", "\U0001f600",
]  # fmt: skip


@SETTINGS
@given(pieces=st.lists(st.one_of(st.sampled_from(YAML_PIECES), st.text(max_size=5)), max_size=25))
def test_any_text(tmp_path: Path, pieces: list[str]) -> None:
    path = tmp_path / "text.yml"
    path.write_bytes("".join(pieces).encode("utf-8", "surrogatepass"))
    load_or_config_error(lambda: NeoXArgs.from_files([path]))


@SETTINGS
@given(changes=st.dictionaries(keys, values, max_size=4))
def test_any_yaml_document(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "document.yml"
    try:
        text = yaml.safe_dump({**TINY, **changes})
    except yaml.YAMLError:
        return
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    load_or_config_error(lambda: NeoXArgs.from_files([path], overrides=[path]))


@SETTINGS
@given(text=st.text(max_size=30))
def test_any_set(tmp_path: Path, text: str) -> None:
    path = tmp_path / "base.yml"
    path.write_text(yaml.safe_dump(TINY))
    for assignment in (text, f"seed={text}", f"{text}=1", f"optimizer.{text}"):
        load_or_config_error(lambda a=assignment: NeoXArgs.from_files([path], sets=[a]))


@SETTINGS
@given(text=st.text(max_size=40))
def test_any_payload_and_hostlist(text: str) -> None:
    with pytest.raises(ConfigError):
        decode_config(text)
    try:
        expand_hostlist(text)
    except ConfigError:
        return


def test_a_dict_that_contains_itself() -> None:
    loop: dict[str, Any] = dict(TINY)
    loop["deepspeed_extra_args"] = loop
    with pytest.raises(ConfigError, match="nested"):
        NeoXArgs.from_dict(loop)


def test_wide_bomb() -> None:
    bomb: Any = [0] * 100
    for _ in range(5):
        bomb = [bomb] * 100
    with pytest.raises(ConfigError, match="values"):
        NeoXArgs.from_dict({**TINY, "eval_lengths": bomb})


@pytest.mark.parametrize("name", ["\x00.yml", "a" * 5000, ""])
def test_odd_paths(name: str) -> None:
    with pytest.raises(ConfigError):
        NeoXArgs.from_files([name])
