"""Compiled code is loaded from a place of one's own, and a broken library is built again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.engines import cpp_build


def test_a_shared_cache_directory_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERPLE_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    assert cpp_build._cache_directory() == tmp_path
    tmp_path.chmod(0o777)
    own = cpp_build._cache_directory()
    assert own == tmp_path / f"user-{os.getuid()}"
    assert own.stat().st_mode & 0o077 == 0
    own.chmod(0o777)  # somebody made it for us
    assert not cpp_build._cache_directory().is_relative_to(tmp_path)


def test_a_garbage_library_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []

    def build() -> Path:
        path = tmp_path / "attention.so"
        if not path.exists():
            built.append(path)
            path.write_bytes(b"garbage" if len(built) == 1 else b"good")
        return path

    def load(path: Path) -> object:
        if path.read_bytes() != b"good":
            raise OSError("invalid ELF header")
        return "library"

    monkeypatch.setattr(cpp_build, "_build", build)
    monkeypatch.setattr(cpp_build, "_open", load)
    assert cpp_build._load_once.__wrapped__() == "library"
    assert len(built) == 2
