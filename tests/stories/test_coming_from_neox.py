"""docs/coming_from_neox.md says what is so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from megatron.data import IndexedDataset
from megatron.errors import ConfigError
from megatron.neox_arguments import FACTS, GROUPS, KNOWN_KEYS, OWNER, NeoXArgs
from megatron.neox_arguments.command_line import build_script_parser
from megatron.neox_arguments.normalize import (
    DERIVED,
    IGNORED,
    UNIMPLEMENTED,
    canonical_key,
    normalize,
)
from megatron.neox_arguments.yaml_files import parse_yaml
from tests.conftest import FIXTURES, REPOSITORY
from tests.fixture_archives import unpacked
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


# GPT-NeoX's argument classes, recorded: each key with its class, type, default and choices.
NEOX_KEYS: dict[str, dict[str, Any]] = json.loads((FIXTURES / "neox_keys.json").read_text())
TABLE = "\n".join(line for line in PAGE.splitlines() if line.startswith("|"))
IN_TABLE = set(re.findall(r"`(\w+)[`:]", TABLE))


@pytest.mark.parametrize("written", sorted(NEOX_KEYS))
def test_every_key_of_gpt_neox_is_the_same_or_listed_or_refused(written: str) -> None:
    key, default = canonical_key(written), NEOX_KEYS[written]["default"]
    if key in DERIVED or key in IGNORED:
        return
    if key in UNIMPLEMENTED:
        assert not problems_of_key(key, default)
        assert problems_of_key(key, "something else")
        return
    assert key in KNOWN_KEYS
    ours = GROUPS[OWNER[key]].model_fields[key].get_default(call_default_factory=True)
    is_same = ours == default and FACTS[key]["changes"] != "nothing"
    is_asked_for = key in ("num_layers", "hidden_size", "num_attention_heads")
    assert is_same or is_asked_for or "refused" in FACTS[key] or key in IN_TABLE


@pytest.mark.parametrize("written", sorted(k for k, f in NEOX_KEYS.items() if f["choices"]))
def test_every_choice_of_gpt_neox_is_taken_or_refused_by_name(written: str) -> None:
    key = canonical_key(written)
    for choice in NEOX_KEYS[written]["choices"] if key in KNOWN_KEYS else ():
        try:
            NeoXArgs.from_dict({**TINY, key: choice})
        except ConfigError as error:
            assert key in str(error)


def problems_of_key(key: str, value: Any) -> list[str]:
    return normalize({key: value}, "page")[1]


def test_no_key_without_effect_is_missing_in_the_table() -> None:
    silent = {key for key, facts in FACTS.items() if facts["changes"] == "nothing"}
    assert silent <= IN_TABLE


def test_the_number_of_keys_and_models_is_stated() -> None:
    recorded = list(unpacked("neox_random").iterdir())
    assert f"each of GPT-NeoX's {len(NEOX_KEYS)} keys" in PAGE
    assert f"compares {len(recorded)} models" in PAGE


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
    scripts = ("train.py", "evaluate.py")
    help_text = "".join(build_script_parser(script).format_help() for script in scripts)
    for flag in re.findall(r"`(--wandb_\w+|--eval_tasks|--iteration|--override|--set)\b", PAGE):
        assert flag in help_text


def test_the_numbers_of_files_are_those_that_are_tested() -> None:
    described, total = map(
        int, re.findall(r"accepts (\d+) of GPT-NeoX's (\d+) files", " ".join(PAGE.split()))[0]
    )
    assert not FILES or len(FILES) == total
    assert total - len(REFUSED) == described


TOOLS = [
    "ckpts/convert_neox_to_mamba_ssm",
    "ckpts/convert_raw_llama_weights_to_neox",
    "ckpts/merge20b",
    "ckpts/upload",
    "datasets/preprocess_data_with_chat_template",
    "datasets/preprocess_data_with_mask",
]


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_that_are_not_here_answer_with_a_command(tool: str) -> None:
    script = REPOSITORY / "tools" / f"{tool}.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    (named,) = re.findall(r"Use: python (tools/\S+\.py)", line)
    assert (REPOSITORY / named).is_file()


@pytest.mark.parametrize(
    ("flags", "code", "told"),
    [
        (["{}"], 0, "weights (layer index.name)"),
        (["{},{}", "--compare", "--diff"], 0, "differences (first | second)\n  none"),
        (["{},{}", "-c", "-d"], 0, "differences (first | second)\n  none"),
        (["{}", "-c"], 2, "not two paths"),
        (["{}", "-i"], 2, "kerple.load_pretrained"),
        (["{}", "--attributes", "module/lr"], 2, "Use --json"),
    ],
)
def test_checkpoints_are_inspected_with_gpt_neoxs_flags(
    flags: list[str], code: int, told: str
) -> None:
    script = REPOSITORY / "tools" / "ckpts" / "inspect_checkpoints.py"
    words = [flag.replace("{}", str(unpacked("neox_runs") / "zero1")) for flag in flags]
    command = [sys.executable, str(script), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stderr
    assert told in done.stdout + done.stderr


def test_tokens_are_counted_by_gpt_neoxs_tool() -> None:
    prefix = next(unpacked("official_dataset").glob("*.idx")).with_suffix("")
    script = REPOSITORY / "tools" / "datasets" / "dataset_token_count.py"
    command = [sys.executable, str(script), str(prefix)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=100).stdout
    assert f"Dataset size in tokens is {IndexedDataset(prefix).total_tokens}" in output


def test_scripts_are_executable() -> None:
    scripts = [REPOSITORY / "deepy.py", *(REPOSITORY / "tools").glob("[cd]*ts/*.py")]
    assert len(scripts) > 8
    for script in scripts:
        assert os.access(script, os.X_OK), script
        assert script.read_text().startswith("#!/usr/bin/env python"), script
