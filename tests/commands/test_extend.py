"""kerple extend: the config it writes, its dry run, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.commands import kerple
from megatron.neox_arguments.yaml_files import parse_yaml, read_text
from tests.checkpoints.small_models import saved_model
from tests.conftest import REPOSITORY


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A rotary checkpoint, in the working directory."""
    monkeypatch.chdir(tmp_path)
    saved_model(tmp_path / "mine", pos_emb="rotary", rotary_pct=0.5)
    return "mine"


def written(name: str) -> dict[str, object]:
    values = parse_yaml(read_text(Path(name)), name)
    assert isinstance(values, dict)
    return values


def test_the_dry_run_writes_the_config_and_explains_it(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["extend", checkpoint, "--steps", "50", "--fade", "20", "--dry-run"]
    words += ["--set", "data_path=data/x", "optimizer.params.lr=0.01"]
    assert kerple(words) == 0
    config = written("mine_kerple_log.yml")
    assert config["pos_emb"] == "kerple_log"
    assert (config["load"], config["load_positions"]) == ("mine", "fresh")
    assert (config["kerple_init"], config["rotary_fade_iters"]) == ("fit", 20)
    assert (config["train_iters"], config["rotary_pct"]) == (50, 0.5)
    assert config["optimizer"]["params"]["lr"] == 0.01  # type: ignore[index]
    output = capsys.readouterr().out
    assert "positions (KERPLE-log)" in output
    assert "50 steps" in output
    assert kerple(words) == 0  # the same command again
    assert kerple([*words, "train_iters=60"]) == 2
    assert "exists and differs" in capsys.readouterr().err


def test_windows_keep_their_rotation(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["extend", checkpoint, "--window", "8", "--name", "mixed", "--dry-run"]
    assert kerple([*words, "--set", "data_path=data/x"]) == 0
    assert written("mixed.yml")["layer_pattern"] == [
        {"pos_emb": "rotary", "sliding_window_width": 8},
        {"pos_emb": "kerple_log"},
    ]
    assert "positions (Rotary + KERPLE-log)" in capsys.readouterr().out


def test_a_model_whose_data_are_unknown_needs_some(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kerple(["extend", checkpoint, "--dry-run"]) == 2
    assert "Add --set data_path=..." in capsys.readouterr().err
    assert not Path("mine_kerple_log.yml").exists()


@pytest.mark.parametrize(
    ("model", "tokens"), [("pythia/160M", "131,072,000"), ("finetune_llama_shape", "262,144,000")]
)
def test_the_config_for_pythia_and_llama_is_ready(
    model: str, tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = REPOSITORY / "configs"
    words = ["deepy", "train.py", str(configs / f"{model}.yml"), "--dry-run"]
    words += ["--override", str(configs / "extend_rope.yml")]
    assert kerple([*words, "--set", "load=folder", "data_path=data/x", "save=runs/x"]) == 0
    output = capsys.readouterr().out
    assert "load_positions: fresh" in output
    assert "rope_scaling" not in output
    assert f"1,000 steps = {tokens} tokens in all" in output
