"""A run is never overwritten, never continued as another, and never trained twice at once."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.fixture_archives import unpacked
from tests.training.cases import ADAM, write_data
from tests.training.runs import finish, losses, run, run_config, start_run, wait_for


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def finished(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of six, without `load` in the config."""
    directory = tmp_path_factory.mktemp("finished")
    output = run(_config(data, directory / "run"), directory)
    assert "starting" in output
    return directory / "run"


def _config(data: str, save: Path, **changes: Any) -> dict[str, Any]:
    config = run_config(data, save, train_iters=6, eval_interval=3, **changes)
    if "load" not in changes:
        del config["load"]
    return config


def _copy(run_directory: Path, tmp_path: Path) -> Path:
    shutil.copytree(run_directory, tmp_path / "run")
    return tmp_path / "run"


def _state(save: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(save)): path.read_bytes()
        for path in sorted(save.rglob("*"))
        if path.is_file() and not path.name.startswith(".lock")
    }


def _refused(config: dict[str, Any], directory: Path) -> str:
    save = Path(config["save"])
    before = _state(save)
    codes, outputs = finish(start_run(config, directory))
    assert codes == [2], outputs[0]
    assert "Traceback" not in outputs[0]
    assert _state(save) == before
    return next(line for line in outputs[0].splitlines() if line.startswith("error"))


def test_a_finished_run_changes_nothing(data: str, finished: Path, tmp_path: Path) -> None:
    save = _copy(finished, tmp_path)
    before = _state(save)
    output = run(_config(data, save), tmp_path)
    assert "already finished (step 6 of 6)" in output
    assert _state(save) == before


def test_a_longer_training_goes_on_without_load(data: str, finished: Path, tmp_path: Path) -> None:
    save = _copy(finished, tmp_path)
    output = run({**_config(data, save), "train_iters": 8}, tmp_path)
    assert "holds this run already: continuing it after step 6" in output
    assert "train_iters is 8, it was 6" in output
    assert sorted(losses(save)) == list(range(1, 9))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pos_emb", "alibi"),
        ("kerple_constraint", "softplus"),
        ("activation", "relu"),
        ("gpt_j_residual", True),
        ("num_attention_heads", 2),
        ("train_batch_size", 8),
        ("seed", 7),
        ("split", "70,20,10"),
        ("weight_decay", 0.1),
        ("hidden_size", 64),
        ("optimizer", {**ADAM, "params": {**ADAM["params"], "betas": [0.9, 0.99]}}),
    ],
)
def test_another_run_is_refused_by_key_and_both_values(
    data: str, finished: Path, tmp_path: Path, key: str, value: Any
) -> None:
    save = _copy(finished, tmp_path)
    error = _refused({**_config(data, save), "train_iters": 8, key: value}, tmp_path)
    assert f"{key}" in error
    assert "in the checkpoint and" in error
    for way_out in ("another `save`", "finetune: true", "allow_changed: [", "overwrite: true"):
        assert way_out in error


def test_a_change_that_is_named_is_allowed_and_no_sample_is_skipped(
    data: str, finished: Path, tmp_path: Path
) -> None:
    save = _copy(finished, tmp_path)
    changed = {
        **_config(data, save),
        "train_iters": 8,
        "train_batch_size": 8,
        "allow_changed": ["train_batch_size"],
    }
    output = run(changed, tmp_path)
    assert "train_batch_size is 4 in the checkpoint and 8 in the config" in output
    state = save / "global_step8" / "mp_rank_00_model_states.pt"
    from megatron.checkpoints.safe_files import load_mapping

    assert load_mapping(state)["consumed_samples"] == 6 * 4 + 2 * 8


def test_overwriting_moves_the_old_run_aside(data: str, finished: Path, tmp_path: Path) -> None:
    save = _copy(finished, tmp_path)
    (save / "notes.txt").write_text("mine")
    old = losses(save)
    output = run({**_config(data, save), "overwrite": True, "seed": 5, "train_iters": 2}, tmp_path)
    assert f"is now in {save}.replaced1" in output
    assert losses(tmp_path / "run.replaced1") == old
    assert (tmp_path / "run.replaced1" / "global_step6" / "checksums.json").is_file()
    assert sorted(losses(save)) == [1, 2]
    assert (save / "notes.txt").read_text() == "mine"


def test_a_run_that_lost_its_checksums_is_not_destroyed(
    data: str, finished: Path, tmp_path: Path
) -> None:
    save = _copy(finished, tmp_path)
    (save / "global_step6" / "checksums.json").unlink()
    error = _refused({**_config(data, save, load="auto"), "train_iters": 8}, tmp_path)
    assert "checksums.json is missing" in error
    assert "--set iteration=4" in error
    assert (save / "global_step4").is_dir()


def test_other_data_under_the_same_name_is_refused(
    data: str, finished: Path, tmp_path: Path
) -> None:
    save = _copy(finished, tmp_path)
    (tmp_path / "moved").mkdir()
    moved = tmp_path / "moved" / "tiny_text_document"
    for suffix in (".bin", ".idx"):
        shutil.copy(data + suffix, f"{moved}{suffix}")
    run({**_config(str(moved), save), "train_iters": 7}, tmp_path)
    (tmp_path / "other").mkdir()
    other = write_data(tmp_path / "other", seed=9)
    error = _refused({**_config(other, save), "train_iters": 8}, tmp_path)
    assert "was trained on other data" in error


def test_one_training_at_a_time_and_the_last_line_continues(data: str, tmp_path: Path) -> None:
    save = tmp_path / "run"
    config = {**_config(data, save), "train_iters": 4000}
    job = start_run(config, tmp_path)
    wait_for(save / "latest", job)
    codes, outputs = finish(start_run(config, tmp_path / "second"))
    assert codes == [2], outputs[0]
    assert f"process {job[0].pid}" in outputs[0]
    assert "is training into it" in outputs[0]
    job[0].send_signal(signal.SIGTERM)
    codes, outputs = finish(job)
    assert codes == [75], outputs[0]
    last = outputs[0].strip().splitlines()[-1]
    assert last == f"to continue: python train.py {tmp_path / 'config.yml'}"
    steps = sorted(losses(save))
    assert steps == list(range(1, len(steps) + 1))
    history = json.loads((save / "manifest.json").read_text())["history"]
    assert history[-1]["reason"] == "received SIGTERM"


@pytest.mark.parametrize("kind", ["file", "read-only"])
def test_a_place_that_cannot_be_written_is_said_first(data: str, tmp_path: Path, kind: str) -> None:
    save = tmp_path / "run"
    if kind == "file":
        save.write_text("")
    else:
        save = Path("/proc/run")
    codes, outputs = finish(start_run(_config(data, save), tmp_path / "config"))
    assert codes == [2], outputs[0]
    assert f"save = {save}" in outputs[0]
    assert "Traceback" not in outputs[0]


@pytest.mark.parametrize("settings", [{"iteration": 4}, {"load": "another"}])
def test_an_evaluation_alone_changes_nothing_of_the_run_in_save(
    data: str, finished: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Without `load` it is that run which is measured; fresh weights once were."""
    save = _copy(finished, tmp_path)
    before = _state(save)
    if "load" in settings:
        shutil.copytree(finished, tmp_path / "another")
        settings = {"load": str(tmp_path / "another"), "iteration": 4}
    output = run({**_config(data, save), "do_train": False, **settings}, tmp_path)
    assert "resuming after step 4" in output and "step 4: test loss" in output
    assert _state(save) == before


def test_another_programs_run_is_not_continued_without_its_optimizer(
    data: str, tmp_path: Path
) -> None:
    """GPT-NeoX would go on from it; here that takes `finetune: true`, and is said."""
    official = unpacked("official_kerple_log")
    line = _refused(_config(data, tmp_path / "run", load=str(official)), tmp_path)
    assert "step 7 of another program" in line
    assert "finetune: true" in line
