"""The command line of tools/reproduce.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.commands import run
from megatron.paper.cli import main
from megatron.paper.suite import load_suite


def test_plan_writes_complete_configs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--suite", "demo", "--runs", str(tmp_path), "--write", "--list"]
    assert main(arguments) == 0
    configs = list((tmp_path / "demo").glob("*/config.yml"))
    assert len(configs) == len(load_suite("demo").runs)
    assert "pos_emb: " in configs[0].read_text(encoding="utf-8")
    assert configs[0].parent.name in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--suite", "nope"], "no suite 'nope'"),
        (["run", "--suite", "smoke", "-j", "0"], "at least one"),
        (["plan", "--suite", "smoke", "--set", "train_iters"], "expected KEY=VALUE"),
    ],
)
def test_wrong_arguments_end_with_a_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("reproduce", arguments) == 2
    assert message in capsys.readouterr().err
