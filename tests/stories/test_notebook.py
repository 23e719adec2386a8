"""The notebook and the example scripts run."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

from megatron.model.position_names import POSITIONAL_EMBEDDINGS
from tests.conftest import REPOSITORY

NOTEBOOK = REPOSITORY / "examples" / "kernels_by_hand.ipynb"
STEPS = 100  # of the notebook's 200


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    pictures = [
        output
        for cell in cells
        if cell["cell_type"] == "code"
        for output in cell["outputs"]
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 2, "stored by make docs-outputs"
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mpl.use("Agg")
    space: dict[str, Any] = {}
    source = "\n".join(code_cells())
    assert "STEPS, BATCH, LENGTH = 200," in source
    try:
        exec(compile(source.replace("= 200,", f"= {STEPS},"), str(NOTEBOOK), "exec"), space)
    finally:
        POSITIONAL_EMBEDDINGS.pop("root", None)
    assert space["root"].r1.grad is not None
    assert space["is_cpd"](space["root"](128).bias.detach())
    log, rotary = space["found"]["kerple_log"], space["found"]["rotary"]
    assert max(log) < 1.1 * log[0], "flat beyond its training length"
    assert rotary[-1] > 1.2 * rotary[0], "and this one is not"
    import matplotlib.pyplot as plt

    assert len(plt.get_fignums()) == 2
    plt.close("all")


EXAMPLES = REPOSITORY / "examples"


@pytest.mark.parametrize("name", ["kerple_in_plain_pytorch", "kerple_in_gpt2", "train_inkling"])
def test_the_example_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "loss" in printed
    assert "nan" not in printed
