"""Metrics that survive restarts without duplicates, TensorBoard, wandb, the manifest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoints.store import CheckpointStore
from megatron.errors import CheckpointError
from megatron.neox_arguments.run_keys import DataArgs
from megatron.training.metrics import (
    JsonLines,
    _sha256,
    check_data,
    data_identity,
    flatten,
    for_loggers,
    recorded_data,
)
from tests.training.cases import write_data
from tests.training.runs import losses, run, run_config


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """6 steps, then to 10, then once more although it is finished; all sinks on."""
    directory = tmp_path_factory.mktemp("observed")
    config = run_config(
        write_data(directory),
        directory / "run",
        train_iters=10,
        log_interval=2,
        eval_interval=5,
        tensorboard_dir=str(directory / "tensorboard"),
        use_wandb=True,
        wandb_project="tests",
        exit_interval=6,
    )
    run(config, directory)
    run(config, directory)
    run(config, directory)
    return directory, config


def _lines(directory: Path) -> list[dict[str, Any]]:
    text = (directory / "run" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_every_number_once(restarted: tuple[Path, dict[str, Any]]) -> None:
    directory, _ = restarted
    lines = _lines(directory)
    assert sorted(losses(directory / "run")) == [2, 4, 6, 8, 10]
    for kind, steps in {
        "valid_loss": [5, 10],
        "test_loss": [10],
        "kernel": [0, 2, 4, 6, 8, 10],
        "effective_length": [0, 2, 4, 6, 8, 10],
    }.items():
        assert [line["step"] for line in lines if kind in line] == steps, kind


def test_what_a_line_holds(restarted: tuple[Path, dict[str, Any]]) -> None:
    lines = _lines(restarted[0])
    train = next(line for line in lines if "loss" in line)
    for name in (
        "lr",
        "grad_norm",
        "tokens_per_second",
        "model_tflops",
        "step_seconds",
        "memory_gb",
        "time",
    ):
        assert train[name] > 0, name
    assert train["skipped_steps"] == 0
    assert "mfu" not in train, "no peak is known for a CPU"
    kernel = next(line["kernel"] for line in lines if "kernel" in line)
    assert {name: len(heads) for name, heads in kernel.items()} == {"r1": 4, "r2": 4}
    assert len(next(line["effective_length"] for line in lines if "effective_length" in line)) == 4


def test_tensorboard_has_the_same_numbers(restarted: tuple[Path, dict[str, Any]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory, _ = restarted
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    found = {event.step: event.value for event in events.Scalars("train/lm_loss")}
    assert found == pytest.approx(losses(directory / "run"))
    assert len(events.Scalars("kernel/r1/4")) == 6, "heads are counted from 1"
    assert "kernel/r1/0" not in events.Tags()["scalars"]


def test_wandb_is_one_run_kept_offline(restarted: tuple[Path, dict[str, Any]]) -> None:
    runs = sorted((restarted[0] / "run" / "wandb").glob("offline-run-*"))
    identities = {path.name.rsplit("-", 1)[1] for path in runs}
    assert len(runs) >= 2 and len(identities) == 1


def test_the_manifest(restarted: tuple[Path, dict[str, Any]]) -> None:
    directory, config = restarted
    manifest = json.loads((directory / "run" / "manifest.json").read_text())
    assert manifest["config"]["num_layers"] == 2
    assert manifest["seed"] == 1234 and manifest["world_size"] == 1
    assert {"torch", "deepspeed"} <= manifest["packages"].keys()
    data = manifest["data"][config["data_path"]]
    assert len(data["idx_sha256"]) == len(data["bin_sample_sha256"]) == 64
    history = manifest["history"]
    assert [(entry["from_step"], entry["at_step"]) for entry in history] == [
        (0, 6),
        (6, 10),
    ]
    assert [entry["reason"] for entry in history] == [
        "exit_interval 6 reached",
        "finished",
    ]


def test_lines_cut_short_or_ahead_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n{"step": 3, "loss": 1}\n{"st')
    sink = JsonLines(file, 2)
    sink.write(3, {"loss": 1.5})
    sink.close()
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"step": 1, "loss": 3},
        {"step": 2, "loss": 2},
        {"step": 3, "loss": 1.5},
    ]


def test_a_run_killed_before_its_first_checkpoint_leaves_no_line_twice(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    for _ in range(2):
        sink = JsonLines(file, 0)
        sink.write(0, {"kernel": {"r1": [1.0]}})  # recorded before the first step
        sink.write(1, {"loss": 3.0})
        sink.close()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [0, 1]


def test_a_run_that_only_evaluates_keeps_every_line_but_the_one_it_repeats(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 2, "loss": 3.0}, {"step": 2, "valid_loss": 2.0}, {"step": 4, "loss": 1.0}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    JsonLines(path, 2, finished=True).close()
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert kept == [lines[0], lines[2]]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl", 0)
    sink.write(1, {"loss": float("nan"), "kernel": {"r1": [1.0, float("inf")]}})
    sink.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 1, "loss": null, "kernel": {"r1": [1.0, null]}}\n'


def test_changed_data_changes_the_hash(tmp_path: Path) -> None:
    file = tmp_path / "data.bin"
    content = bytearray(b"x" * (1 << 23))
    file.write_bytes(content)
    whole, sample = _sha256(file, None), _sha256(file, 4)
    content[-1] = 0
    file.write_bytes(content)
    assert _sha256(file, None) != whole and _sha256(file, 4) != sample


def test_nested_values_are_named() -> None:
    values = {"loss": 1, "kernel": {"r1": [2.0, 3.0]}, "text": "x", "none": None}
    assert flatten(values) == {"loss": 1.0, "kernel/r1/1": 2.0, "kernel/r1/2": 3.0}


def test_without_its_manifest_a_runs_data_is_not_taken_on_trust(tmp_path: Path) -> None:
    prefix = write_data(tmp_path)
    data = DataArgs(data_path=str(prefix))
    step = tmp_path / "global_step1"
    assert "names no data" in check_data(step, data, ())[0]
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({"data": data_identity(data)}))
    assert check_data(step, data, ()) == [] and recorded_data(step) == data_identity(data)
    tokens = Path(f"{prefix}.bin")
    tokens.write_bytes(tokens.read_bytes()[::-1])
    with pytest.raises(CheckpointError, match="was trained on other data"):
        check_data(step, data, ())
    for damaged in (manifest.read_text()[:-9], "[]", '{"data": 3}', ""):
        manifest.write_text(damaged)
        with pytest.raises(CheckpointError, match=r"manifest.json: is damaged.*allow_changed"):
            check_data(step, data, ())
        assert check_data(step, data, ["data_path"]) == []


def test_a_checkpoint_knows_its_data_without_a_manifest(
    restarted: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    directory, config = restarted
    newest = CheckpointStore(directory / "run").newest()
    assert newest is not None
    step = shutil.copytree(directory / "run" / f"global_step{newest}", tmp_path / "global_step1")
    data = DataArgs(data_path=config["data_path"])
    assert not (tmp_path / "manifest.json").exists()
    assert check_data(step, data, ()) == []
    other = tmp_path / "other"
    for suffix in (".idx", ".bin"):
        shutil.copyfile(f"{config['data_path']}{suffix}", f"{other}{suffix}")
    assert check_data(step, DataArgs(data_path=str(other)), ()) == []  # wherever it lies
    tokens = bytearray(Path(f"{other}.bin").read_bytes())
    tokens[0] ^= 1
    Path(f"{other}.bin").write_bytes(tokens)
    with pytest.raises(CheckpointError, match="global_step1: was trained on other data"):
        check_data(step, DataArgs(data_path=str(other)), ())
    assert check_data(step, DataArgs(data_path=str(other)), ["data_path"]) == []
    layout = json.loads((step / "layout.json").read_text())
    (step / "layout.json").rename(step / "universal.json")  # where a reshard has it
    assert check_data(step, data, ()) == [] and recorded_data(step) == layout["data"]
    with pytest.raises(CheckpointError, match="global_step1: was trained on other data"):
        check_data(step, DataArgs(data_path=str(other)), ())


def test_the_samples_of_the_tokens_are_64_blocks(tmp_path: Path) -> None:
    """64 blocks of 64 KiB spread over the file, the first and the last among them."""
    data, tokens = DataArgs(data_path=str(tmp_path / "data")), tmp_path / "data.bin"
    (tmp_path / "data.idx").write_bytes(b"index")
    with tokens.open("wb") as file:
        file.truncate(127 << 16)
    seen, before = [], data_identity(data)
    for block in range(127):
        with tokens.open("r+b") as file:
            file.seek(block << 16)
            file.write(b"x")
        now = data_identity(data)
        seen += [block] if now != before else []
        before = now
    assert seen == list(range(0, 127, 2))


def test_loggers_get_gpt_neoxs_names() -> None:
    values = {"loss": 1.0, "lr": 0.1, "valid_loss": 2.0, "valid_ppl": 7.4, "mfu": 0.4}
    assert for_loggers(values) == {
        "train/lm_loss": 1.0,
        "train/learning_rate": 0.1,
        "validation/lm_loss": 2.0,
        "validation/lm_loss_ppl": 7.4,
        "mfu": 0.4,
    }
