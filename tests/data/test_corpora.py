"""The corpora by name, and what is said when one cannot be fetched."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from megatron.data import corpora
from megatron.data.corpora import SOURCES, standard_library_files
from megatron.data.download import RemoteFile
from tests.data.samples import prepare


def test_the_standard_library_corpus_has_no_tests_and_no_packages() -> None:
    files = standard_library_files()
    parts = {part for path in files for part in path.parts}
    assert not parts & {"test", "tests", "site-packages", "__pycache__"}
    assert any(path.name == "argparse.py" for path in files)
    assert all(path.suffix == ".py" for path in files)


@pytest.mark.parametrize("name", [n for n, s in SOURCES.items() if s.files])
def test_without_a_network_the_error_says_what_to_do(
    tmp_path: Path,
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nowhere = (RemoteFile("x", ("http://127.0.0.1:9/x",)),)
    monkeypatch.setitem(SOURCES, name, dataclasses.replace(SOURCES[name], files=nowhere))
    assert prepare(tmp_path, name) == 2
    error = capsys.readouterr().err
    assert f"--input PATH {name}" in error and "jsonl.zst" in error and "refused" in error


def test_pip_without_an_index_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = (sys.executable, "-c", "raise SystemExit('no network')", "pip")
    monkeypatch.setattr(corpora, "PIP_DOWNLOAD", nothing)
    assert prepare(tmp_path, "django_docs") == 2
    error = capsys.readouterr().err
    assert "pip could not fetch Django==5.2.8: no network" in error
    assert "--input PATH django_docs" in error
