"""docs/coming_from_neox.md says what is so."""

from __future__ import annotations

import re

import pytest

from megatron.neox_arguments import KNOWN_KEYS, NeoXArgs
from megatron.neox_arguments.command_line import build_script_parser
from megatron.neox_arguments.yaml_files import parse_yaml
from tests.conftest import REPOSITORY
from tests.neox_arguments.samples import TINY
from tests.stories.test_neox_configs import FILES, REFUSED

PAGE = (REPOSITORY / "docs" / "coming_from_neox.md").read_text(encoding="utf-8")
SWITCHES = [
    switch
    for row in re.findall(r"^\|.*\| (.+) \|$", PAGE, flags=re.MULTILINE)
    for switch in re.findall(r"`(\w+: [^`]+)`", row)
]


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_is_a_key_that_takes_its_value(switch: str) -> None:
    values = parse_yaml(switch, "page")
    (key,) = values
    assert key in KNOWN_KEYS
    args = NeoXArgs.from_dict({**TINY, **values})
    assert args.to_dict()[key] == values[key] != NeoXArgs.from_dict(TINY).to_dict().get(key)


def test_the_table_has_switches() -> None:
    assert len(SWITCHES) >= 8


def test_every_file_that_is_named_exists() -> None:
    named = re.findall(r"`(?:python )?((?:tools|tests)/[\w/]+\.py|\w+\.py)\b", PAGE)
    assert len(named) >= 6
    for name in named:
        assert (REPOSITORY / name).is_file(), name
    for name in ("125M", "local_setup"):
        assert (REPOSITORY / "configs" / f"{name}.yml").is_file()


def test_every_flag_that_is_named_is_taken() -> None:
    help_text = build_script_parser("train.py").format_help()
    for flag in re.findall(r"`(--wandb_\w+|--eval_tasks|--iteration|--override|--set)\b", PAGE):
        assert flag in help_text


def test_the_numbers_of_files_are_those_that_are_tested() -> None:
    total, described = map(
        int, re.findall(r"(\d+) files, (\d+) are described", " ".join(PAGE.split()))[0]
    )
    assert not FILES or len(FILES) == total
    assert total - len(REFUSED) == described
