"""The drop-in examples run, and do what they say."""

from __future__ import annotations

import runpy
import sys

import pytest

from tests.conftest import REPOSITORY

EXAMPLES = REPOSITORY / "examples"


@pytest.mark.parametrize("name", ["kerple_in_plain_pytorch", "kerple_in_gpt2", "train_inkling"])
def test_the_example_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "loss" in printed
    assert "nan" not in printed
