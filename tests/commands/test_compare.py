"""kerple compare: kernels as a suite, and what does not go together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron.commands import run
from megatron.commands.compare import BASELINES, suite_content
from tests.conftest import REPOSITORY

OWN = """
import torch
from megatron.model.positional_embeddings import DistanceKernel, Positive, Uniform

class SqrtLog(DistanceKernel):
    learnable = {"r1": Positive(Uniform(0, 2)), "r2": Positive(Uniform(0, 1))}

    def bias(self, d, r1, r2):
        return -r1 * torch.sqrt(torch.log1p(r2 * d) + 1e-3)

class NanAtZero(SqrtLog):
    def bias(self, d, r1, r2):
        return -r1 * torch.sqrt(torch.log1p(r2 * d))
"""
SMALL = [
    *("num_layers=1", "hidden_size=16", "train_iters=2", "eval_iters=1", "eval_num_sequences=2"),
    *("eval_lengths=[128,256]", "train_micro_batch_size_per_gpu=2", "log_interval=1"),
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "my_kernels.py").write_text(OWN)
    (tmp_path / "my books").mkdir()
    text = (REPOSITORY / "LICENSE").read_text("utf-8")
    (tmp_path / "my books" / "a.txt").write_text(text)
    return tmp_path


@pytest.mark.slow  # README's test runs it once
def test_own_kernel_beside_a_known_one(place: Path) -> None:
    """Twice: the second call finds both runs finished."""
    words = ["compare", "my_kernels:SqrtLog", "--with", "alibi", "--input", str(place / "my books")]
    for said in ("2 runs, 0 finished, 2 to do", "2 runs, 2 finished, 0 to do"):
        done = subprocess.run(
            [sys.executable, "-m", "megatron.commands", *words, "--set", *SMALL],
            cwd=place,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert said in done.stdout and "SqrtLog" in done.stdout
    report = place / "runs" / "compare" / "report"
    page = (report / "report.md").read_text("utf-8")
    assert "SqrtLog" in page and "figures/main_kernels.png" in page
    figure = (report / "figures" / "main_kernels.svg").read_text("utf-8")
    assert figure.count("SqrtLog") and figure.count("ALiBi")


def test_a_kernel_that_cannot_be_trained_is_refused_at_once(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert run("compare", ["my_kernels:NanAtZero"]) == 2
    assert "the gradient of r2 is not finite at distance 0" in capsys.readouterr().err
    assert run("compare", ["my_kernels:Nothing"]) == 2
    assert "'my_kernels:Nothing' cannot be imported" in capsys.readouterr().err
    assert not (place / "runs").exists()


def test_the_suite_is_the_demos_with_other_methods() -> None:
    content = suite_content(["a:B", *BASELINES], "stdlib", [1, 2])
    demo = REPOSITORY / "megatron" / "paper" / "suites" / "demo.yml"
    assert content["models"] == yaml.safe_load(demo.read_text("utf-8"))["models"]
    section = content["sections"]["main"]
    assert section["methods"] == ["a:B", *BASELINES] and content["seeds"] == [1, 2]
    assert section["table"]["mark_significance"] and "published" not in section["table"]


def test_folders_of_runs_do_not_go_with_what_is_to_be_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "alibi").mkdir()  # a method's name stays one
    assert run("compare", ["a", "alibi", "--with", "rpe"]) == 2
    error = capsys.readouterr().err
    assert "alibi --with: cannot be combined with folders of trained runs (a)" in error
    assert run("compare", ["a"]) == 2
    assert "a: give the folders of two trained runs or more" in capsys.readouterr().err
