"""Who may name code: a file of the user's, never one in a checkpoint's or run's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.neox_arguments import allowed_code
from megatron.neox_arguments.allowed_code import (
    allow_flags,
    allow_kernel,
    is_allowed,
    is_import_path,
    is_inside_checkpoint,
    without_code,
)

MINE = "my_module:MyKernel"


@pytest.fixture(autouse=True)
def _nothing_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowed_code, "_allowed", set())


@pytest.mark.parametrize("name", ["os", "a.b", "a:b:c", "a:b()", "../a:b", "a b:c", ":C", "a:"])
def test_only_a_module_and_a_class_are_an_import_path(name: str) -> None:
    assert is_import_path(MINE) and is_import_path("package.module:Class")
    assert not is_import_path(name)
    with pytest.raises(ConfigError, match=r"package\.module:ClassName"):
        allow_kernel(name)


@pytest.mark.parametrize("mark", ["checksums.json", "metrics.jsonl", "resolved.yml"])
def test_a_file_beside_a_runs_files_may_have_come_with_it(tmp_path: Path, mark: str) -> None:
    config = tmp_path / "run" / "configs" / "mine.yml"
    config.parent.mkdir(parents=True)
    assert not is_inside_checkpoint(config)
    (tmp_path / "run" / mark).touch()
    assert is_inside_checkpoint(config)


@pytest.mark.parametrize(
    "weights",
    [
        "layer_00-model_00-model_states.pt",
        "mp_rank_00_model_states.pt",
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "model-00001-of-00002.safetensors",
        "pytorch_model.bin",
        "latest",
        "universal.json",
    ],
)
@pytest.mark.parametrize("config", ["configs/model.yml", "model.yml"])
def test_what_the_loader_takes_for_a_checkpoint_is_one(
    tmp_path: Path, weights: str, config: str
) -> None:
    """Whatever the folder is called."""
    file = tmp_path / "download" / config
    file.parent.mkdir(parents=True)
    file.write_text(f"pos_emb: {MINE}")
    (tmp_path / "download" / weights).touch()
    with pytest.raises(ConfigError, match="--allow-kernel"):
        without_code(file, {"pos_emb": MINE})


@pytest.mark.parametrize("config", ["configs/model.yml", "model.yml"])
def test_a_config_beside_a_folder_of_weights_may_have_come_with_it(
    tmp_path: Path, config: str
) -> None:
    file, folder = tmp_path / "download" / config, tmp_path / "download" / "renamed"
    file.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    assert not is_inside_checkpoint(file)
    (folder / "mp_rank_00_model_states.pt").touch()
    assert is_inside_checkpoint(file)


def test_a_link_into_a_checkpoint_is_inside_it(tmp_path: Path) -> None:
    inside = tmp_path / "global_step7" / "model.yml"
    inside.parent.mkdir()
    inside.touch()
    elsewhere = tmp_path / "home"
    elsewhere.mkdir()
    (elsewhere / "model.yml").symlink_to(inside)
    assert is_inside_checkpoint(elsewhere / "model.yml")


def test_a_strangers_config_names_no_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "global_step7"
    folder.mkdir()
    values = {"pos_emb": MINE, "eval_include_path": "tasks", "num_layers": 2}
    with pytest.raises(ConfigError, match=f"--allow-kernel {MINE}"):
        without_code(folder / "model.yml", values)
    assert not is_allowed(MINE)
    allow_kernel(MINE)
    kept = without_code(folder / "model.yml", values)
    assert kept == {"pos_emb": MINE, "num_layers": 2}
    assert "eval_include_path is ignored" in capsys.readouterr().err


def test_the_users_own_file_is_obeyed(tmp_path: Path) -> None:
    values = {"pos_emb": MINE, "eval_include_path": "tasks"}
    assert without_code(tmp_path / "mine.yml", values) == values
    assert is_allowed(MINE)


def test_the_next_command_obeys_what_this_one_did() -> None:
    assert allow_flags({"pos_emb": "kerple_log", "eval_tasks": ["sliding"]}) == ""
    asked = allow_flags({"pos_emb": MINE, "eval_tasks": ["sliding", "my_tasks:Mine"]})
    assert asked == f" --allow-kernel {MINE} --allow-kernel my_tasks:Mine"
