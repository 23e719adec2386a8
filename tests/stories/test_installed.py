"""The package installed elsewhere without its checkout, and a checkout beside an installed one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kerple import __version__
from tests.conftest import REPOSITORY

SOURCES = ("kerple", "megatron", "requirements", "pyproject.toml", "setup.py", "README.md")
SOURCES += ("MANIFEST.in", "LICENSE", "CHANGELOG.md", "CITATION.cff")
BUILD_SDIST = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"


def test_a_tool_runs_the_package_of_its_own_checkout(tmp_path: Path) -> None:
    """The tests run in an environment where this checkout is installed: another one comes first."""
    for name in ("kerple", "megatron"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=ignored)
    (tmp_path / "tools").mkdir()
    shutil.copy(REPOSITORY / "tools" / "_start.py", tmp_path / "tools")
    tool = tmp_path / "tools" / "show.py"
    tool.write_text(
        "import _start, kerple, megatron.errors as e; print(kerple.__file__, e.__file__)"
    )
    done = subprocess.run([sys.executable, str(tool)], cwd="/", capture_output=True, text=True)
    assert [Path(file).is_relative_to(tmp_path) for file in done.stdout.split()] == [True, True]


@pytest.mark.slow
def test_kerple_works_without_a_checkout(tmp_path: Path) -> None:
    """A wheel that pip builds from the source archive."""
    source = tmp_path / "source"
    source.mkdir()
    for name in SOURCES:
        origin = REPOSITORY / name
        (shutil.copytree if origin.is_dir() else shutil.copyfile)(origin, source / name)
    build = [sys.executable, "-c", BUILD_SDIST, str(tmp_path)]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (archive,) = tmp_path.glob("kerple*.tar.gz")
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(archive)], check=True)
    package = REPOSITORY / "megatron"
    data = [path for path in package.rglob("*.*") if path.suffix not in (".py", ".pyc", ".so")]
    missing = [path for path in data if not (site / path.relative_to(REPOSITORY)).is_file()]
    assert len(data) > 20 and missing == []
    shutil.copy(REPOSITORY / "configs" / "laptop" / "tiny.yml", tmp_path)
    (tmp_path / "more.yml").write_text("fp32_allreduce: true\n")
    for arguments, expected in (
        (["--version"], __version__),
        (["--help"], "prepare_data"),
        (["demo", "--help"], "kerple demo"),
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
