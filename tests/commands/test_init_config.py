"""kerple init: a config that loads, with the values asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.commands import run
from megatron.neox_arguments import NeoXArgs


def test_a_first_config_is_complete_and_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("init", []) == 0
    args = NeoXArgs.from_files(["first.yml"])
    assert args.model.pos_emb == "kerple_log" and args.checkpoint.save == "runs/first"
    assert "# Transformer layers.\nnum_layers: 4\n" in Path("first.yml").read_text("utf-8")
    hints = capsys.readouterr().err.splitlines()
    assert hints == ["next: kerple prepare_data stdlib", "next: kerple train first.yml"]
    with pytest.raises(SystemExit) as ended:
        run("train", ["first.yml", "--dry-run"])
    assert ended.value.code == 0
    values = ["pos_emb=alibi", "optimizer.params.lr=1e-3", "sliding_window_width=64"]
    assert run("init", ["mine", "--set", *values]) == 0
    mine = NeoXArgs.from_files(["mine.yml"])
    assert (mine.model.pos_emb, mine.model.sliding_window_width) == ("alibi", 64)
    assert mine.to_dict()["optimizer"]["params"]["lr"] == 1e-3


def test_no_file_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.yml").write_text("mine")
    assert run("init", []) == 2
    assert "first.yml: is there already" in capsys.readouterr().err
    assert (tmp_path / "first.yml").read_text() == "mine"
