"""Resume is exact: 2N steps, or N, a checkpoint, a new engine, and N more, are the same bits.

The run of 2N steps saves in the background after N, its writer held until it has taken them all.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.checkpoints import read_checkpoint
from megatron.checkpoints.resuming import _load
from megatron.checkpoints.safe_files import load_file
from megatron.checkpoints.store import CheckpointStore
from megatron.mpu.collectives import SERIAL, ParallelState
from tests.checkpoints.small_models import random_model, small_args
from tests.fuzz.checkpoint_targets import universal
from tests.training.cases import (
    ADAM,
    DROPOUT,
    ON_TWO,
    labelled,
    layout,
    precision,
    run_cases,
    tiny_config,
    write_data,
)
from tests.training.soak import same

HALF = 3
ONE = {
    "zero0": layout(),
    "zero1": layout(zero=1),
    "zero2": layout(zero=2),
    "zero3": layout(zero=3),
    "pp1": layout(pp=1),
    "recomputed": {**layout(), "checkpoint_activations": True},
    "bf16": {**layout(), **precision("bf16")},
    "bf16_zero1": {**layout(zero=1), **precision("bf16")},
    "fp16": {**layout(), "fp16": {"enabled": True, "initial_scale_power": 14}},
    "labels": layout(),
    "muon": {
        **layout(),
        "optimizer": {"type": "Muon", "params": {"lr": 0.01}},
        **dict.fromkeys(DROPOUT, 0.0),  # a checkpoint for any layout has no random states
    },
}
TWO = {
    **ON_TWO,
    "mp2_zero2": layout(mp=2, zero=2),
    "pp2_recomputed": {**layout(pp=2), "checkpoint_activations": True},
    "bf16_pp2": {**layout(pp=2), **precision("bf16")},
}
TABLE = [(name, 1) for name in ONE] + [(name, 2) for name in TWO]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("resume")
    data = write_data(directory)
    cases: dict[int, dict[str, Any]] = {1: {}, 2: {}}
    for name, processes in TABLE:
        # train_batch_size 4 with micro-batches of 1: accumulation is on; so is dropout.
        usual = {"optimizer": ADAM, "weight_decay": 0.1, "lr_decay_style": "cosine", "warmup": 0.2}
        own = labelled(data, "unpacked") if name == "labels" else {}
        config = tiny_config(data, **{**usual, **DROPOUT, **{**ONE, **TWO}[name], **own})
        saved = str(directory / name)
        cases[processes] |= {
            f"{name}-whole": {
                "config": config,
                "steps": 2 * HALF,
                "background": [HALF, str(directory / f"{name}-background")],
            },
            f"{name}-first": {"config": config, "steps": HALF, "save": saved},
            f"{name}-second": {"config": config, "steps": HALF, "resume": saved},
        }
    muon, moved = cases[1]["muon-first"], str(directory / "muon-moved")
    muon["export"] = moved
    cases[1]["muon-moved"] = {**cases[1]["muon-second"], "resume": moved}
    found = run_cases(cases[1], directory, 1) | run_cases(cases[2], directory, 2)
    return {"directory": directory, **found}


@pytest.mark.parametrize(("name", "processes"), TABLE)
def test_resumed_run_is_the_same_to_the_bit(
    results: dict[str, Any], name: str, processes: int
) -> None:
    whole, first, second = (results[f"{name}-{part}"] for part in ("whole", "first", "second"))
    assert first["losses"] + second["losses"] == whole["losses"]
    assert second["fingerprints"] == whole["fingerprints"]
    assert second["kernels"] == whole["kernels"]
    assert first["fingerprints"] != whole["fingerprints"]
    assert all(int(rank["count"]) > 0 for rank in whole["fingerprints"])


@pytest.mark.parametrize(("name", "processes"), TABLE)
def test_a_background_save_is_of_its_moment_to_the_bit(
    results: dict[str, Any], name: str, processes: int
) -> None:
    """It keeps nothing of the steps that were taken while it was written, and holds none up."""
    assert results[f"{name}-whole"]["held_until_the_end"] == [True] * processes
    plain, background = (
        CheckpointStore(results["directory"] / place) for place in (name, f"{name}-background")
    )
    assert background.newest() == plain.newest() == HALF
    assert background.verify(HALF)
    files = sorted(path.relative_to(plain.path(HALF)) for path in plain.path(HALF).rglob("*.pt"))
    others = background.path(HALF).rglob("*.pt")
    assert files == sorted(path.relative_to(background.path(HALF)) for path in others)
    for file in files:
        twins = (load_file(store.path(HALF) / file) for store in (plain, background))
        assert same(*twins), file


def test_muons_states_go_through_a_checkpoint_for_any_layout(results: dict[str, Any]) -> None:
    """A matrix of a linear layer has one state there, every other parameter two."""
    assert results["muon-moved"]["losses"] == results["muon-second"]["losses"]


def test_dropout_was_on(results: dict[str, Any]) -> None:
    """Else the test above would not have tested the random states."""
    first = results["zero0-first"]["fingerprints"][0]["rng"]
    assert first != results["zero0-whole"]["fingerprints"][0]["rng"]


def test_recomputed_activations_change_nothing(results: dict[str, Any]) -> None:
    assert results["recomputed-whole"]["losses"] == results["zero0-whole"]["losses"]


def test_a_universal_checkpoint_is_given_to_the_engine_whole(tmp_path: Path) -> None:
    universal(tmp_path)
    keys = {"pos_emb": "kerple_log", "no_weight_tying": True, "num_layers": 1}
    args = small_args(**keys, make_vocab_size_divisible_by=64)
    module, given = random_model(args, seed=1), dict[Any, Any]()
    engine: Any = SimpleNamespace(
        module=module,
        write_states=given.update,
        set_counters=given.update,
        scheduler=SimpleNamespace(load_state_dict=lambda state: given.update(schedule=state)),
    )
    alone = ParallelState(SERIAL, pp_rank=0, dp_rank=0, dp_size=1, grid=None)
    progress = _load(engine, CheckpointStore(tmp_path), args, 5, alone)
    assert progress["consumed_samples"] == given["global_samples"] == 20
    assert given["schedule"] == {"steps": 5}
    weights = read_checkpoint(tmp_path).weights
    for name, parameter in module.named_parameters():
        states = given[parameter]
        assert states["step"] == 5 and len(states) == 4
        assert torch.equal(states["fp32"], weights[name.removeprefix("sequential.")])
