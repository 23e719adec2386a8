"""The C++ engine builds once, in a cache, and its absence is one warning and nothing more."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from filelock import FileLock

import kerple
from megatron.engines import attention
from megatron.engines import cpp_build as compiled
from megatron.errors import EngineError
from tests.engines.conftest import force
from tests.engines.reference import reference_attention, relative_error


@pytest.fixture
def fresh(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An empty cache, a loader that has not tried yet, and a compiler that does not optimize."""
    force("compiled", monkeypatch)  # skips without a compiler
    quick = tmp_path_factory.mktemp("compiler") / "quick-cxx"
    quick.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "c++")} "$@" -O0\n')
    quick.chmod(0o755)
    monkeypatch.setenv("CXX", str(quick))
    monkeypatch.setenv("KERPLE_TILED_BACKEND", "auto")
    monkeypatch.setenv("KERPLE_CACHE_DIR", str(tmp_path))
    compiled._load_once.cache_clear()
    yield tmp_path
    compiled._load_once.cache_clear()


def run_small() -> None:
    q, k, v = (torch.randn(1, 2, 50, 16) for _ in range(3))
    out = attention(q, k, v, engine="tiled")
    assert relative_error(out, reference_attention(q, k, v)) < 2e-6


def test_builds_once_and_leaves_only_the_library_and_its_lock(
    fresh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kerple.warmup()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("compiling the CPU attention engine with ")
    (library,) = fresh.glob("*.so")
    assert sorted(path.suffix for path in fresh.iterdir()) == [".lock", ".so"]
    built = library.stat().st_mtime_ns
    compiled._load_once.cache_clear()
    assert compiled.load_library() is not None
    assert library.stat().st_mtime_ns == built and capsys.readouterr().err == ""


def test_without_a_compiler_there_is_one_warning_and_the_same_result(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler found") as caught:
        run_small()
        run_small()
    assert len(caught) == 1


def test_a_compiler_that_fails_falls_back_with_its_message(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = fresh / "broken-cxx"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no such flag" >&2\nexit 1\n'
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.warns(UserWarning, match="broken-cxx failed: no such flag"):
        run_small()
    assert not list(fresh.glob("*.tmp"))


def test_a_compiler_that_hangs_is_stopped_and_leaves_nothing(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = fresh / "endless-cxx"
    endless.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\n'
        'while [ "$1" != -o ]; do shift; done\ntouch "$2"\nexec sleep 60\n'
    )
    endless.chmod(0o755)
    monkeypatch.setenv("CXX", str(endless))
    monkeypatch.setattr(compiled, "_TIMEOUT_SECONDS", 2.0)
    with pytest.warns(UserWarning, match="timed out"):
        run_small()
    assert {path.suffix for path in fresh.iterdir() if path != endless} == {".lock"}


def test_a_broken_library_in_the_cache_is_built_again(fresh: Path) -> None:
    target = fresh / f"attention-{compiled._fingerprint(compiled._find_compiler())}.so"
    target.write_bytes(b"not a library")
    run_small()
    assert compiled.load_library() is not None
    assert target.read_bytes().startswith(b"\x7fELF")


def test_forcing_the_compiled_backend_without_a_compiler_is_an_error(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("KERPLE_TILED_BACKEND", "compiled")
    with pytest.warns(UserWarning), pytest.raises(EngineError, match="install a C\\+\\+17"):
        run_small()


def test_unknown_backend_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERPLE_TILED_BACKEND", "rust")
    with pytest.raises(EngineError, match="auto, compiled or python"):
        run_small()


def test_read_only_cache_builds_in_a_private_directory(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = fresh / "file"
    blocked.write_text("a file where the cache should be")
    monkeypatch.setenv("KERPLE_CACHE_DIR", str(blocked))
    directory = compiled._cache_directory()
    assert directory != blocked
    assert directory.stat().st_mode & 0o077 == 0
    directory.rmdir()


def test_waits_for_another_process_that_builds_but_not_for_ever(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_TIMEOUT_SECONDS", 0.3)
    started = time.monotonic()
    name = f"attention-{compiled._fingerprint(compiled._find_compiler())}.lock"
    with FileLock(fresh / name), pytest.warns(UserWarning, match="another process holds"):
        assert compiled.load_library() is None
    assert time.monotonic() - started < 5


def test_processes_that_start_together_all_get_the_library(fresh: Path) -> None:
    code = "from megatron.engines.cpp_build import load_library; assert load_library()"
    processes = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", code], env=dict(os.environ))
        for _ in range(2)
    ]
    assert [process.wait() for process in processes] == [0, 0]
    assert len(list(fresh.glob("*.so"))) == 1


def test_a_shared_cache_directory_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERPLE_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    assert compiled._cache_directory() == tmp_path
    tmp_path.chmod(0o1777)  # as /tmp: others write there, but cannot rename what is ours
    own = compiled._cache_directory()
    assert own == tmp_path / f"user-{os.getuid()}"
    assert own.stat().st_mode & 0o077 == 0
    own.chmod(0o777)  # somebody made it for us
    assert not compiled._cache_directory().is_relative_to(tmp_path)
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    own.rmdir()
    assert compiled.is_private(private)
    own.symlink_to(private)  # or leads us to ours, and elsewhere before we load from it
    assert not compiled.is_private(own)
    assert not compiled._cache_directory().is_relative_to(tmp_path)


def test_a_folder_below_another_users_is_not_private(tmp_path: Path) -> None:
    """Whoever owns the folder above can put another one in its place."""
    mine = tmp_path / "theirs" / "mine"
    mine.mkdir(parents=True, mode=0o700)
    assert compiled.is_private(mine)
    for mode in (0o720, 0o702, 0o722):  # its group or all others write there
        mine.chmod(mode)
        assert not compiled.is_private(mine)
    mine.chmod(0o755)
    assert compiled.is_private(mine)
    mine.parent.chmod(0o777)
    assert not compiled.is_private(mine)
    mine.parent.chmod(0o1777)  # as /tmp: only its owner renames a folder
    assert compiled.is_private(mine)
    mine.parent.chmod(0o755)
    if os.getuid() == 0:
        os.chown(mine.parent, 12345, 12345)
        assert not compiled.is_private(mine)
