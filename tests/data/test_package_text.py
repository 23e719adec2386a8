"""Text out of Debian packages and wheels, with packages made here and an apt-get of our own."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import stat
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
import zstandard

from megatron.commands import run as command_run
from megatron.data import package_text
from megatron.data.download import file_sha256
from megatron.data.package_text import Package, collect_packages, package_record
from megatron.errors import DataError, DownloadError

COMPRESS = {
    ".xz": lzma.compress,
    ".gz": gzip.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


def tar_of(files: dict[str, bytes]) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./usr/share/doc/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return output.getvalue()


def deb(path: Path, files: dict[str, bytes], suffix: str = ".xz") -> Path:
    """A Debian package: an ar archive of three members, the last with the files."""
    members = [
        ("debian-binary", b"2.0\n"),
        ("control.tar.xz", lzma.compress(tar_of({"control": b"odd"})) + b"x"),
        (f"data.tar{suffix}", COMPRESS[suffix](tar_of(files))),
    ]
    parts = [b"!<arch>\n"]
    for name, content in members:
        head = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n"
        parts += [head.encode(), content, b"\n" * (len(content) % 2)]
    path.write_bytes(b"".join(parts))
    return path


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive folder; `apt-get download NAME` copies NAME*.deb out of it."""
    archive, commands = tmp_path / "archive", tmp_path / "commands"
    archive.mkdir()
    commands.mkdir()
    script = commands / "apt-get"
    script.write_text(
        '#!/bin/sh\nfor last; do :; done\ncp "$ARCHIVE/$last"_* . || '
        '{ echo "E: Unable to locate package $last" >&2; exit 100; }\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("ARCHIVE", str(archive))
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    return archive


BOOK = Package("book", "1", "debian", "CC0", (".md",), below="/markdown/")
FILES = {
    "book/markdown/a.md.gz": gzip.compress(b"# First\r\nwords\n"),
    "book/markdown/b.md": b"# Second\n",
    "book/markdown/copy.md": b"# Second\n",
    "book/markdown/empty.md": b" \n",
    "book/markdown/figure.png": b"\x89PNG",
    "book/html/a.md": b"elsewhere",
}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_texts_of_a_debian_package(tmp_path: Path, apt: Path, suffix: str) -> None:
    file = deb(apt / "book_1_all.deb", FILES, suffix)
    (output,) = collect_packages([BOOK], tmp_path / "out")
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert {record["path"]: record["text"] for record in records} == {
        "book/usr/share/doc/book/markdown/a.md": "# First\nwords\n",
        "book/usr/share/doc/book/markdown/b.md": "# Second\n",
    }
    (note,) = package_record(tmp_path / "out")
    assert note["file"] == "book_1_all.deb" and note["sha256"] == file_sha256(file)
    assert (note["licence"], note["documents"], note["characters"]) == ("CC0", 2, 23)
    assert not list((tmp_path / "out").glob("**/*.deb"))  # the package itself is not kept


def test_the_real_dpkg_reads_what_the_test_wrote(tmp_path: Path) -> None:
    """Otherwise the tests above would only show that we agree with ourselves."""
    try:
        listing = subprocess.run(
            ["dpkg-deb", "--fsys-tarfile", str(deb(tmp_path / "book_1_all.deb", FILES))],
            capture_output=True,
            check=True,
        )
    except FileNotFoundError:
        pytest.skip("no dpkg-deb on this machine")
    with tarfile.open(fileobj=io.BytesIO(listing.stdout)) as archive:
        assert "./usr/share/doc/book/markdown/b.md" in archive.getnames()


def test_collected_once(tmp_path: Path, apt: Path) -> None:
    file = deb(apt / "book_1_all.deb", FILES)
    first = collect_packages([BOOK], tmp_path / "out")
    file.unlink()
    assert collect_packages([BOOK], tmp_path / "out") == first


def test_another_version_is_told(
    tmp_path: Path, apt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deb(apt / "book_2_all.deb", FILES)
    collect_packages([Package(**{**BOOK.__dict__, "sha256": "0" * 64})], tmp_path / "out")
    assert "book_2_all.deb is not version 1" in capsys.readouterr().err


def test_absent_damaged_and_empty_packages(tmp_path: Path, apt: Path) -> None:
    with pytest.raises(DownloadError, match="Unable to locate package book"):
        collect_packages([BOOK], tmp_path / "out")
    file = deb(apt / "book_1_all.deb", FILES)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"book_1_all.deb: damaged"):
        collect_packages([BOOK], tmp_path / "out")
    file.write_bytes(b"no package")
    with pytest.raises(DataError, match="not a Debian package"):
        collect_packages([BOOK], tmp_path / "out")
    deb(file, {"book/markdown/a.png": b""})
    with pytest.raises(DataError, match="no text in it"):
        collect_packages([BOOK], tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_a_machine_without_apt_hears_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(package_text.shutil, "which", lambda name: None)
    assert command_run("prepare_data", ["-d", str(tmp_path), "-q", "latex_docs"]) == 2
    error = capsys.readouterr().err
    assert "no apt-get" in error and "--input PATH latex_docs" in error


def test_a_wheel_must_be_the_very_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], cwd: Path, **_: object) -> subprocess.CompletedProcess[str]:
        with zipfile.ZipFile(cwd / "code-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("code/b.py", "b = 2\n")
            wheel.writestr("code/data.bin", b"\0")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(package_text.subprocess, "run", pip)
    package = Package("code", "1", "wheel", "MIT", (".py",))
    (output,) = collect_packages([package], tmp_path / "out")
    assert json.loads(output.read_text()) == {"text": "b = 2\n", "path": "code/code/b.py"}
    wrong = Package("code", "1", "wheel", "MIT", (".py",), sha256="0" * 64)
    with pytest.raises(DownloadError, match="sha256"):
        collect_packages([wrong], tmp_path / "other")
