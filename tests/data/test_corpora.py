"""The corpora by name, and what is said when one cannot be fetched."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
import tarfile
from pathlib import Path

import pytest

from megatron.data import corpora
from megatron.data.corpora import SOURCES, standard_library_files
from megatron.data.download import RemoteFile, file_sha256
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


def test_a_manual_that_was_fetched_before_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "django-5.2.8.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in (("docs/b.txt", b"second"), ("docs/a.txt", b"first"), ("x.py", b"")):
            member = tarfile.TarInfo(f"django-5.2.8/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    monkeypatch.setattr(corpora, "DJANGO_SHA256", file_sha256(archive))
    monkeypatch.setattr(corpora, "run_fetcher", None)
    (pages,) = corpora._django_docs(tmp_path)
    found = [json.loads(line) for line in pages.read_text().splitlines()]
    assert [page["text"] for page in found] == ["first", "second"]
