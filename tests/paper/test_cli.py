"""The command line of tools/reproduce.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.commands import run
from megatron.paper.cli import main
from megatron.paper.suite import load_suite
from tests.conftest import REPOSITORY


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


def test_help_loads_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys; from megatron.paper.cli import build_parser; build_parser().format_help(); "
        "print([name for name in ('torch', 'matplotlib', 'deepspeed') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_report_without_results_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--suite", "smoke", "--runs", str(tmp_path)]) == 1
    assert "no results of the suite's settings: " in capsys.readouterr().out
