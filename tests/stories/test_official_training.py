"""The official code's training steps and samples, recorded, are ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data import build_train_valid_test_datasets
from tests.fixture_archives import unpacked
from tests.processes import REPOSITORY, run_ranks

WORKER = str(REPOSITORY / "tests" / "training" / "parity_worker.py")
STEPS = 60
# Recording -> what the official code does without being told, as keys of ours.
RECORDINGS = {
    "training_kerple_log": ["lr_decay_rule=kerple"],
    "training_rpe_linear": ["lr_decay_rule=kerple", "kerple_weight_decay=0.1"],
}
# Name in the recording -> ours.
KERNELS = {"kernel_bias_p": "r1", "kernel_bias_a": "r2", "kernel_weight": "weight"}


def recorded(name: str) -> dict[str, Any]:
    with np.load(unpacked("official_training") / name / "training.npz") as content:
        return dict(content)


def train(name: str, directory: Path, *sets: str) -> list[dict[str, Any]]:
    output = directory / "steps.json"
    run_ranks([WORKER, str(unpacked("official_training") / name), str(output), *sets])
    steps: list[dict[str, Any]] = json.loads(output.read_text())
    return steps


@pytest.mark.parametrize(
    ("name", "pipe_parallel_size"), [("training_kerple_log", 1), ("training_rpe_linear", 0)]
)
def test_every_step_is_the_official_codes(
    tmp_path: Path, name: str, pipe_parallel_size: int
) -> None:
    theirs = recorded(name)
    ours = train(name, tmp_path, *RECORDINGS[name], f"pipe_parallel_size={pipe_parallel_size}")
    assert len(ours) == len(theirs["loss"]) == STEPS
    np.testing.assert_allclose([s["lr"] for s in ours], theirs["lr"], rtol=0, atol=1e-9)
    np.testing.assert_allclose([s["loss"] for s in ours], theirs["loss"], rtol=0, atol=1e-5)
    norms = [s["grad_norm"] for s in ours]
    np.testing.assert_allclose(norms, theirs["grad_norm"], rtol=1e-4)
    for key in theirs.keys() & KERNELS.keys():
        found = [s["kernel"][KERNELS[key]] for s in ours]
        np.testing.assert_allclose(found, theirs[key], rtol=0, atol=1e-5, err_msg=key)


def test_each_assignment_is_needed(tmp_path: Path) -> None:
    """The test above can fail: without the fork's decay T5's table ends elsewhere."""
    theirs = recorded("training_rpe_linear")["kernel_weight"]
    ours = train("training_rpe_linear", tmp_path, "lr_decay_rule=kerple", "pipe_parallel_size=0")
    assert np.abs(np.array(ours[-1]["kernel"]["weight"]) - theirs[-1]).max() > 1e-4


OFFICIAL = unpacked("official_dataset")
EXPECTED = np.load(OFFICIAL / "expected_a.npz")
SETTINGS = json.loads((OFFICIAL / "expected_a.json").read_text())


@pytest.mark.parametrize("runs", [1, 2], ids=["built", "from cache"])
@pytest.mark.parametrize("which", ["train", "valid"])
def test_samples_equal_the_official_ones(tmp_path: Path, runs: int, which: str) -> None:
    for _ in range(runs):
        train, valid, test = build_train_valid_test_datasets(
            OFFICIAL / "toy_text_document", **SETTINGS, cache_dir=tmp_path
        )
    dataset = {"train": train, "valid": valid}[which]
    assert dataset is not None
    assert test is None  # one document in a thousand of 120 rounds to none
    assert len(dataset) == int(EXPECTED[f"{which}_len"])
    for item, expected in enumerate(EXPECTED[which]):
        sample = dataset[item]["text"]
        assert sample.dtype == np.int64
        np.testing.assert_array_equal(sample, expected)


def test_another_seed_gives_another_order(tmp_path: Path) -> None:
    settings = {**SETTINGS, "seed": SETTINGS["seed"] + 1}
    train, _, _ = build_train_valid_test_datasets(
        OFFICIAL / "toy_text_document", **settings, cache_dir=tmp_path
    )
    assert train is not None
    assert not np.array_equal(train[0]["text"], EXPECTED["train"][0])


def test_default_cache_is_beside_the_data(tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(OFFICIAL / f"toy_text_document{suffix}", tmp_path)
    build_train_valid_test_datasets(tmp_path / "toy_text_document", **SETTINGS)
    assert list((tmp_path / "index_cache").glob("toy_text_document_train_*.index"))
