"""Runs, weights and exports of commit 655be44 train on and give the logits they gave there."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from kerple import load_pretrained
from megatron.commands import run as run_command
from tests.fixture_archives import unpacked
from tests.training.runs import losses, run

OLD = unpacked("run_655be44")


def test_an_old_run_is_read_and_goes_on_as_it_would_have_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it has checksums: nothing is unverified
        assert load_pretrained(tmp_path / "run").iteration == 4
    assert run_command("inspect_checkpoint", [str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"]["optimizer_states"] is True
    caches = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*.index")}
    assert len(caches) == 3
    config = yaml.safe_load((OLD / "config.yml").read_text())
    config |= {
        "data_path": str(tmp_path / "data" / "tiny_text_document"),
        "save": str(tmp_path / "run"),
    }
    output = run(config, tmp_path / "config")
    assert "resuming after step 4" in output
    recorded = {
        int(step): loss for step, loss in json.loads((OLD / "losses.json").read_text()).items()
    }
    found = losses(tmp_path / "run")
    before = {step: loss for step, loss in recorded.items() if step <= 4}
    assert {step: found[step] for step in before} == pytest.approx(before, abs=2e-6)
    # Since 0.2.0 attention dropout, here of 0.1, draws other masks.
    assert found == pytest.approx(recorded, abs=4e-3)
    assert {path: path.stat().st_mtime_ns for path in caches} == caches  # used, not built again


@pytest.mark.parametrize("form", ["run", "hf"])
def test_old_weights_give_the_old_logits(form: str) -> None:
    expected = np.load(OLD / "expected.npz")
    model = load_pretrained(OLD / form)
    with torch.no_grad():
        logits = model(torch.from_numpy(expected["tokens"]))
    np.testing.assert_allclose(logits[:, ::8].numpy(), expected["logits"], atol=1e-5, rtol=0)
