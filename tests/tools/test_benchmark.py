"""The command of all benchmarks: what it offers, and what it refuses before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import OutputError
from tools.benchmark import BENCHMARKS, main


def test_unknown_benchmark_lists_what_there_is(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["nothing"])
    assert "attention" in capsys.readouterr().err


@pytest.mark.parametrize("name", BENCHMARKS)
def test_sizes_and_results_are_tried_first(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ending:
        main([name, "--repeats", "0"])
    assert ending.value.code == 2
    assert "--repeats: must be at least 1" in capsys.readouterr().err
    (tmp_path / "file").touch()
    option = "--output" if name in ("data", "evaluate") else "--json"
    with pytest.raises(OutputError, match=option):
        main([name, option, str(tmp_path / "file" / "out.json")])
