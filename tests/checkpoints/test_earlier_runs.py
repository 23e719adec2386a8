"""Runs that began before a key existed are resumed as they began."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from megatron.checkpoints.store import CHECKSUMS, CheckpointStore, checksum
from megatron.training.schedule import Schedule
from tests.training.cases import write_data
from tests.training.runs import run, run_config

STEPS, FIRST = 6, 2


def forget_keys(save: Path, *keys: str) -> None:
    """Make the newest checkpoint one of a version that did not know `keys`."""
    store = CheckpointStore(save)
    newest = store.newest()
    assert newest is not None
    folder = store.path(newest)
    file = folder / "configs" / "resolved.yml"
    saved = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({key: saved[key] for key in saved if key not in keys}))
    sums = json.loads((folder / CHECKSUMS).read_text())
    sums["configs/resolved.yml"] = [file.stat().st_size, checksum(file)]
    (folder / CHECKSUMS).write_text(json.dumps(sums))


def rates(save: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["lr"] for line in lines if "lr" in line}


@pytest.mark.parametrize("override", [False, True])
def test_a_run_from_before_lr_decay_rule_keeps_its_schedule(tmp_path: Path, override: bool) -> None:
    save = tmp_path / "run"
    schedule = {"lr_decay_style": "exponential", "warmup": 0.34, "lr_decay_iters": STEPS}
    config = run_config(write_data(tmp_path), save, **schedule)
    run({**config, "train_iters": FIRST, "lr_decay_rule": "earlier"}, tmp_path)
    forget_keys(save, "lr_decay_rule", "kerple_lr_scale", "kerple_weight_decay")
    again = {**config, "train_iters": STEPS, "override_lr_scheduler": override}
    output = run(again, tmp_path)
    assert ("from before lr_decay_rule existed" in output) is not override
    rule = "neox" if override else "earlier"
    rate = Schedule(0.01, 0.0, 0.34 * STEPS, STEPS, "exponential", rule)
    expected = {step: rate(step - 1) for step in range(FIRST + 1, STEPS + 1)}
    found = rates(save)
    assert {step: found[step] for step in expected} == pytest.approx(expected, rel=1e-9)
    saved = yaml.safe_load((save / f"global_step{STEPS}/configs/resolved.yml").read_text())
    assert saved["lr_decay_rule"] == rule  # what the next resume goes by
