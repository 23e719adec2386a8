"""The package installed elsewhere, without its checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

SOURCES = ("kerple", "megatron", "requirements", "pyproject.toml", "setup.py", "README.md")


@pytest.mark.slow
def test_kerple_works_without_a_checkout(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in SOURCES:
        origin = REPOSITORY / name
        (shutil.copytree if origin.is_dir() else shutil.copyfile)(origin, source / name)
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True)
    package = REPOSITORY / "megatron"
    data = [path for path in package.rglob("*.*") if path.suffix not in (".py", ".pyc", ".so")]
    missing = [path for path in data if not (site / path.relative_to(REPOSITORY)).is_file()]
    assert len(data) > 20 and missing == []
    shutil.copy(REPOSITORY / "configs" / "laptop" / "tiny.yml", tmp_path)
    (tmp_path / "more.yml").write_text("fp32_allreduce: true\n")
    for arguments, expected in (
        (["--help"], "prepare_data"),
        (
            ["deepy", "train", "tiny.yml", "--dry-run"],
            f"{site}/megatron/commands/__main__.py train",
        ),
        (["deepy", "eval.py", "tiny.yml", "--dry-run"], "megatron/commands/__main__.py eval"),
        (["evaluate", "tiny.yml", "--dry-run"], "pos_emb: kerple_log"),
        (["check", "tiny.yml", "more.yml"], "fp32_allreduce: here averages"),
        (["plot-kernels", "alibi", "--heads", "2"], "alibi.png"),
        (["reproduce", "plan", "--suite", "paper/wikitext103"], "H100 80 GB"),
    ):
        done = subprocess.run(
            [sys.executable, str(site / "bin" / "kerple"), *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
