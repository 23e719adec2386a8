"""Triton's cache on a node of many ranks, and its C compiler: no GPU needed for either."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import time
from importlib.metadata import requires, version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock

from megatron.engines import triton_runtime
from megatron.engines.triton_runtime import (
    TRITON_OF_TORCH,
    Launch,
    compile_turn,
    use_node_local_cache,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path))
    monkeypatch.setattr(triton_runtime, "_folder", None)
    monkeypatch.setattr(triton_runtime, "_launched", set())


def test_the_cache_is_the_nodes_own_and_private(tmp_path: Path) -> None:
    folder = use_node_local_cache()
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert os.environ["TRITON_CACHE_DIR"] == str(folder)
    assert use_node_local_cache() == folder


def test_a_directory_that_was_chosen_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    assert use_node_local_cache() == tmp_path / "mine"


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_of_a_job_share_a_nodes_cache_and_one_process_keeps_its_own(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    monkeypatch.setattr(triton_runtime, "use_node_local_cache", lambda: used.append(ranks))
    triton_runtime.launcher_problem.__wrapped__()
    assert used == [2] * (ranks - 1)


def test_code_is_not_loaded_from_a_directory_that_others_can_write(tmp_path: Path) -> None:
    open_to_all = tmp_path / f"kerple-triton-{os.getuid()}"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert use_node_local_cache() != open_to_all


RANK = """
import sys, time
from pathlib import Path
from megatron.engines.triton_runtime import compile_turn, use_node_local_cache
folder = use_node_local_cache()
for launch in range(3):
    with compile_turn("kernel"):
        if launch == 0:  # only the first launch compiles
            inside = folder / "inside"
            assert not inside.exists(), "two ranks compile at once"
            inside.touch()
            time.sleep(0.2)
            inside.unlink()
"""


def test_ranks_of_a_node_compile_one_after_the_other(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_TMPDIR": str(tmp_path)}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK], env=environment, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 0, errors.decode()


def test_only_the_first_launch_of_a_kernel_takes_a_turn() -> None:
    folder = use_node_local_cache()
    with compile_turn("a"):
        assert (folder / "compiling.lock").exists()
    (folder / "compiling.lock").unlink()
    start = time.monotonic()
    with compile_turn("a"):
        assert not (folder / "compiling.lock").exists()
    assert time.monotonic() - start < 1.0


def test_a_process_that_is_stopped_while_it_compiles_holds_nobody_up_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = use_node_local_cache()
    monkeypatch.setattr(triton_runtime, "TURN_SECONDS", 0.1)
    with FileLock(folder / "compiling.lock", is_singleton=False), compile_turn("a"):
        pass
    assert "a" in triton_runtime._launched


class _NoLauncher:
    @property
    def utils(self) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC\nmore")


@pytest.fixture
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(active=_NoLauncher())
    stand_in = SimpleNamespace(runtime=SimpleNamespace(driver=driver))
    monkeypatch.setattr(triton_runtime, "triton", stand_in)
    monkeypatch.delenv("CC", raising=False)


@pytest.mark.usefixtures("_no_launcher")
def test_a_node_without_a_compiler_is_told_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    reason = triton_runtime.launcher_problem.__wrapped__()
    assert reason == (
        "Triton cannot build its launcher (Failed to find C compiler. Please specify via CC);"
        " this node has no C compiler: load gcc or clang on every node, or set CC"
    )


@pytest.mark.usefixtures("_no_launcher")
def test_missing_headers_are_told_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "/usr/bin/cc")
    monkeypatch.setattr(triton_runtime.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    reason = triton_runtime.launcher_problem.__wrapped__()
    assert f"{tmp_path}/Python.h is missing: install Python's headers" in (reason or "")


def test_an_old_triton_is_told_with_the_version_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_runtime, "triton", SimpleNamespace(__version__="3.6.0"))
    assert triton_runtime.unavailable() == (
        "Triton 3.6.0 is too old, its compiler fails on these kernels;"
        " pip install 'triton>=3.7' (torch 2.13.0 for CUDA brings 3.7.1)"
    )
    assert not triton_runtime.interpreted()
    for good in ("3.7.1", "3.10.0+git1", "4.0.0"):
        monkeypatch.setattr(triton_runtime, "triton", SimpleNamespace(__version__=good))
        assert triton_runtime.unavailable() is None


def test_the_tests_install_the_triton_that_torch_requires() -> None:
    def pinned(name: str, file: str) -> str:
        content = (ROOT / "requirements" / file).read_text()
        found = re.search(rf"^{name}==([\w.]+)", content, re.MULTILINE)
        assert found is not None, f"{file} does not pin {name}"
        return found[1]

    torch_version = pinned("torch", "requirements.txt")
    assert pinned("triton", "requirements-dev.txt") == TRITON_OF_TORCH[torch_version]
    for requirement in requires("torch") or ():  # a CPU wheel of torch names no Triton
        if (found := re.match(r"triton==([\w.]+)", requirement)) is not None:
            assert found[1] == TRITON_OF_TORCH[version("torch").partition("+")[0]]


def test_a_launch_with_other_operands_takes_its_own_turn_to_compile() -> None:
    half, full = torch.zeros(2, dtype=torch.float16), torch.zeros(2)

    def variant(*arguments: object, **options: object) -> object:
        return Launch("kernel", (1,), arguments, options).variant

    assert variant((full, 16), 3, STAGES=2) == variant((full + 1, 32), 5, STAGES=2)
    others = [
        variant((None, 16), 3, STAGES=2),
        variant((half, 16), 3, STAGES=2),
        variant((full, 17), 3, STAGES=2),
        variant((full, 16), 3, STAGES=1),
    ]
    assert len({variant((full, 16), 3, STAGES=2), *others}) == 5
