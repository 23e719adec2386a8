"""The demo's kerple_log model must train as it did when the golden losses were recorded.

A change that is meant to keep the numbers keeps these; one that changes them on purpose records
them anew: `python -m tests.stories.test_golden`. The text is the licence, because the demo's own
corpus differs between versions of Python.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from megatron.neox_arguments import NeoXArgs
from megatron.paper.suite import load_suite
from tests.conftest import REPOSITORY
from tests.processes import run_ranks
from tools.gpu_checks.training import write_licence_corpus

GOLDEN = REPOSITORY / "tests" / "golden" / "demo_kerple_log.json"
STEPS = 40


def demo_config(directory: Path) -> dict[str, Any]:
    """The demo's config for kerple_log, on the licence's paragraphs, a line of metrics a step."""
    runs = [run for run in load_suite("demo").runs if run.method == "kerple_log"]
    changes = {
        "data_path": str(write_licence_corpus(directory)),
        "data_cache_dir": str(directory / "cache"),
        "save": str(directory / "run"),
        "load": None,
        "train_iters": STEPS,
        "log_interval": 1,
        "eval_interval": 1000,
        "eval_iters": 1,
        "checkpoint_factor": None,
        "kerple_lr_scale": 1,  # the demo's kernels moved at the model's rate when this was recorded
    }
    return {**runs[0].config, **changes}


def train(directory: Path) -> dict[str, Any]:
    """Losses of all steps, the validation loss and the learned kernel."""
    config = directory / "config.yml"
    config.write_text(NeoXArgs.from_dict(demo_config(directory)).to_yaml())
    run_ranks(["train.py", str(config)])
    text = (directory / "run" / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in text]
    return {
        "losses": [round(line["loss"], 5) for line in lines if "loss" in line],
        "valid_loss": [round(line["valid_loss"], 5) for line in lines if "valid_loss" in line],
        "kernel": [line["kernel"] for line in lines if "kernel" in line][-1],
    }


def test_the_demo_trains_as_recorded(tmp_path: Path) -> None:
    golden, found = json.loads(GOLDEN.read_text()), train(tmp_path)
    assert len(found["losses"]) == STEPS
    # Other processors sum in another order; the difference grows slowly over the steps.
    assert found["losses"] == pytest.approx(golden["losses"], rel=1e-3)
    assert found["valid_loss"] == pytest.approx(golden["valid_loss"], rel=1e-3)
    for name, values in golden["kernel"].items():
        assert found["kernel"][name] == pytest.approx(values, rel=1e-2, abs=1e-3), name


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(json.dumps(train(Path(scratch)), indent=1) + "\n")
        print(f"recorded {GOLDEN}")
