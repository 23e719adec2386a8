"""kill -9 at any moment, and full disks: the run continues to the same end."""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoints.safe_files import load_file
from megatron.checkpoints.store import CheckpointStore
from tests.training.cases import ADAM, ON_TWO, run_cases, tiny_config, write_data
from tests.training.runs import (
    final_valid_loss,
    finish,
    losses,
    run,
    run_config,
    start_run,
    wait_for,
)
from tests.training.soak import same

STEPS = 60


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def uninterrupted(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    run(_config(data, directory / "run"), directory)
    return directory / "run"


def _config(data: str, save: Path, steps: int = STEPS) -> dict[str, Any]:
    return run_config(data, save, train_iters=steps, checkpoint_factor=1)


def _kill_until_done(config: dict[str, Any], directory: Path, kills: int, seed: int) -> None:
    """Kill the run `kills` times at random moments after its first own step, then let it end."""
    save = Path(config["save"])
    generator = random.Random(seed)
    for _ in range(kills):
        before = len(losses(save)) if (save / "metrics.jsonl").exists() else 0
        job = start_run(config, directory)
        deadline = time.monotonic() + 120
        while not (save / "metrics.jsonl").exists() or len(losses(save)) <= before:
            assert job[0].poll() is None, job[0].communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(generator.uniform(0.0, 0.2))
        job[0].send_signal(signal.SIGKILL)
        finish(job)
        newest = CheckpointStore(save).newest()
        if newest is not None:
            CheckpointStore(save).verify(newest)
    output = run(config, directory, timeout=600)
    assert "resuming after step" in output


def _same_end(directory: Path, uninterrupted: Path) -> None:
    assert losses(directory / "run") == losses(uninterrupted)
    assert final_valid_loss(directory / "run") == final_valid_loss(uninterrupted)
    history = json.loads((directory / "run" / "manifest.json").read_text())["history"]
    assert history[-1]["reason"] == "finished"


def test_killed_runs_continue_to_the_same_end(
    data: str, uninterrupted: Path, tmp_path: Path
) -> None:
    _kill_until_done(_config(data, tmp_path / "run"), tmp_path, kills=2, seed=7)
    _same_end(tmp_path, uninterrupted)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills(data: str, tmp_path: Path) -> None:
    steps = 250  # more than twenty starts can take before they are killed
    run(_config(data, tmp_path / "whole" / "run", steps), tmp_path, timeout=600)
    _kill_until_done(_config(data, tmp_path / "run", steps), tmp_path, kills=20, seed=11)
    _same_end(tmp_path, tmp_path / "whole" / "run")


def test_a_damaged_checkpoint_is_named_and_the_previous_one_works(
    data: str, uninterrupted: Path, tmp_path: Path
) -> None:
    save = tmp_path / "run"
    shutil.copytree(uninterrupted, save)
    file = save / f"global_step{STEPS}" / "mp_rank_00_model_states.pt"
    file.write_bytes(file.read_bytes()[:-100])
    codes, outputs = finish(start_run(_config(data, save), tmp_path))
    assert codes == [2], outputs[0]
    assert f"global_step{STEPS} is damaged: mp_rank_00_model_states.pt has" in outputs[0]
    assert f"--set iteration={STEPS - 1}" in outputs[0]
    output = run({**_config(data, save), "iteration": STEPS - 1}, tmp_path)
    assert f"resuming after step {STEPS - 1}" in output
    _same_end(tmp_path, uninterrupted)
    CheckpointStore(save).verify(STEPS)


# async_save: steps go on while a checkpoint is written. The program below holds its writer.

HOLDING = """
import sys, time
from pathlib import Path
from megatron.checkpoints import safe_files
write = safe_files.synced_save
def held(state, path):
    while "global_step10" in str(path) and not Path(sys.argv[1]).exists():
        time.sleep(0.01)
    return write(state, path)
safe_files.synced_save = held
from megatron.commands import run
sys.exit(run("train", sys.argv[2:]))
"""


def _start_held(config: dict[str, Any], directory: Path) -> list[subprocess.Popen[str]]:
    """Up to a step after the tenth, whose checkpoint waits for the file `gate`."""
    job = start_run(config, directory, program=["-c", HOLDING, str(directory / "gate")])
    save = Path(config["save"])
    wait_for(save / "metrics.jsonl", job)
    deadline = time.monotonic() + 90
    while max(losses(save), default=0) < 13:
        assert job[0].poll() is None, job[0].communicate()[0]
        assert time.monotonic() < deadline, "no step is taken while the writer waits"
        time.sleep(0.01)
    assert CheckpointStore(save).steps() == [5]
    assert (save / ".incomplete" / "global_step10").is_dir()
    return job


def _background(data: str, save: Path) -> dict[str, Any]:
    return {**_config(data, save), "checkpoint_factor": 5, "async_save": True}


def test_a_kill_while_the_writer_is_held_leaves_the_older_checkpoint(
    data: str, uninterrupted: Path, tmp_path: Path
) -> None:
    save = tmp_path / "run"
    job = _start_held(_background(data, save), tmp_path)
    job[0].send_signal(signal.SIGKILL)
    finish(job)
    assert CheckpointStore(save).newest() == 5
    assert "resuming after step 5" in run(_background(data, save), tmp_path)
    _same_end(tmp_path, uninterrupted)
    ours, theirs = (CheckpointStore(place).path(STEPS) for place in (save, uninterrupted))
    for file in ours.glob("*.pt"):
        assert same(load_file(file), load_file(theirs / file.name)), file.name


def test_a_signal_waits_for_the_writer_then_saves(data: str, tmp_path: Path) -> None:
    save = tmp_path / "run"
    config = {**_background(data, save), "checkpoint_factor": 10, "extra_save_iters": [5]}
    job = _start_held({**config, "keep_last_n_checkpoints": None, "train_iters": 10_000}, tmp_path)
    job[0].send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert job[0].poll() is None and CheckpointStore(save).steps() == [5]
    (tmp_path / "gate").touch()
    codes, outputs = finish(job)
    assert codes == [75], outputs[0]
    last = max(losses(save))
    assert CheckpointStore(save).steps() == [5, 10, last]
    assert [CheckpointStore(save).verify(step) for step in (10, last)] == [True, True]


@pytest.fixture(params=["limit", pytest.param("tmpfs", marks=pytest.mark.slow)])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A directory, and how to make its file system full for a running process."""
    place = tmp_path / "small"
    place.mkdir()
    if request.param == "limit":

        def fill(pid: int) -> None:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, 4096))

        yield place, fill
        return
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")

    def fill_up(pid: int) -> None:
        with (place / "ballast").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"0" * 4096)

    yield place, fill_up
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_loses_nothing(
    data: str, uninterrupted: Path, small_disk: Any, tmp_path: Path, background: bool
) -> None:
    place, fill = small_disk
    save = place / "run"
    job = start_run({**_config(data, save), "async_save": background}, tmp_path)
    wait_for(save / "latest", job)
    fill(job[0].pid)
    codes, outputs = finish(job)
    assert codes == [2], outputs[0]
    assert "error (rank 0): writing checkpoint global_step" in outputs[0]
    assert "Earlier checkpoints are untouched" in outputs[0]
    assert "Traceback" not in outputs[0]
    newest = CheckpointStore(save).newest()
    assert newest is not None
    CheckpointStore(save).verify(newest)
    (place / "ballast").unlink(missing_ok=True)
    run(_config(data, save), tmp_path)
    whole = losses(uninterrupted)
    resumed = losses(save)
    assert {step: whole[step] for step in resumed} == resumed
    assert resumed[STEPS] == whole[STEPS]


FULL_ON_ONE_RANK = [("dp2_zero1", False), ("dp2_zero1", True), ("pp2", False)]


@pytest.fixture(scope="module")
def disks_of_two(data: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The second of two ranks cannot write its files."""
    directory = tmp_path_factory.mktemp("disks")
    cases = {}
    for name, background in FULL_ON_ONE_RANK:
        changes = {"optimizer": ADAM, "async_save": background, **ON_TWO[name]}
        cases[f"{name}_{background}"] = {
            "config": tiny_config(data, **changes),
            "steps": 1,
            "save": str(directory / f"{name}_{background}"),
            "full_disk_on": 1,
        }
    return {**run_cases(cases, directory, 2), "directory": directory}


@pytest.mark.parametrize(("name", "background"), FULL_ON_ONE_RANK)
def test_a_rank_that_cannot_write_fails_the_save_on_all(
    disks_of_two: dict[str, Any], name: str, background: bool
) -> None:
    errors = disks_of_two[f"{name}_{background}"]["save_errors"]
    for error in errors:
        assert "rank 1: OSError" in error and "No space left" in error and "rank 0:" not in error
    left = disks_of_two["directory"] / f"{name}_{background}"
    assert not (left / "latest").exists()
    assert list(left.glob("global_step*")) == []
