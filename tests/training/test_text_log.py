"""log_dir keeps what a rank prints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron.training.entry import text_log


def test_output_goes_to_the_terminal_and_to_the_ranks_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    with text_log(str(tmp_path / "logs")):
        print("a line")
        print("a warning", file=sys.stderr)
    print("not logged")
    captured = capsys.readouterr()
    assert captured.out == "a line\nnot logged\n" and captured.err == "a warning\n"
    assert (tmp_path / "logs" / "rank_00003.log").read_text() == "a line\na warning\n"


def test_without_a_directory_nothing_changes() -> None:
    before = sys.stdout
    with text_log(None):
        assert sys.stdout is before
