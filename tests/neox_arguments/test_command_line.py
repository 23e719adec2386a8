"""The command line that all scripts share, and the config that deepy.py hands on."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.command_line import (
    MAX_PAYLOAD,
    decode_config,
    encode_config,
    parse_command_line,
)
from tests.neox_arguments.samples import TINY, write


@pytest.fixture
def config(tmp_path: Path) -> str:
    return str(write(tmp_path, "tiny.yml", json.dumps(TINY)))


def test_shortcut_flags_set_their_keys(config: str) -> None:
    args, _ = parse_command_line(
        "evaluate.py",
        [config, "--eval_tasks", "passkey", "lambada", "--iteration", "7", "-i", "in",
         "-o", "out", "--wandb_group", "g: 1", "--eval_results_prefix", "p", "-H", "hosts",
         "--wandb_run_name", "first", "--wandb_team", "us"],
    )  # fmt: skip
    assert args.evaluation.eval_tasks == ["passkey", "lambada"]
    assert args.checkpoint.iteration == 7
    assert (args.generation.sample_input_file, args.generation.sample_output_file) == ("in", "out")
    assert (args.logging.wandb_group, args.launcher.hostfile) == ("g: 1", "hosts")
    assert (args.logging.wandb_run_name, args.logging.wandb_team) == ("first", "us")
    assert args.evaluation.eval_results_prefix == "p"


def test_a_variable_names_the_hostfile(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLTS_HOSTFILE", "/some/hosts")
    args, _ = parse_command_line("train.py", [config])
    assert args.launcher.hostfile == "/some/hosts"
    args, _ = parse_command_line("train.py", [config, "-H", "mine"])
    assert args.launcher.hostfile == "mine"


def test_a_wrong_config_is_one_line_and_status_2(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        parse_command_line("train.py", [config, "--set", "num_layers=0"])
    assert ending.value.code == 2
    assert capsys.readouterr().err.startswith("error: num_layers = 0 is wrong")


def test_files_that_are_too_long_for_an_argument_stay_behind() -> None:
    """Linux takes 128 KiB in one: the values go first, what the files said of them second."""
    args = NeoXArgs.from_dict(TINY).with_sources({"long.yml": "# " + "x" * MAX_PAYLOAD})
    handed_on = decode_config(encode_config(args))
    assert handed_on == args and handed_on.sources == {}
    many = NeoXArgs.from_dict({**TINY, "train_data_paths": ["data/part" * 10] * 2000})
    with pytest.raises(ConfigError, match="train_data_paths"):
        encode_config(many)


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"config": 1, "sources": 2}', b"\xff"])
def test_what_deepy_did_not_write_is_refused(content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"--megatron_config is not a config made by deepy\.py"):
        decode_config(base64.urlsafe_b64encode(content).decode())


def test_an_unknown_flag_names_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse_command_line("train.py", ["x.yml", "--dryrun"])
    assert "unrecognized arguments: --dryrun. Did you mean --dry-run?" in capsys.readouterr().err


def test_each_script_helps_with_its_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """All flags work everywhere; --help shows those that matter."""
    shown = {}
    for script in ("train.py", "evaluate.py", "generate.py"):
        with pytest.raises(SystemExit):
            parse_command_line(script, ["--help"])
        shown[script] = capsys.readouterr().out
    assert "--eval_tasks" not in shown["train.py"] and "--wandb_group" in shown["train.py"]
    assert "--eval_tasks" in shown["evaluate.py"] and "-o SAMPLE" not in shown["evaluate.py"]
    assert "-o SAMPLE" in shown["generate.py"] and "--eval_tasks" not in shown["generate.py"]
