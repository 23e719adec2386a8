"""The corpora of prepare_data.py (their table is corpora.yml), and how each is fetched."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from megatron.atomic_files import write_json_lines
from megatron.data.download import RemoteFile, download, file_sha256
from megatron.data.package_text import PIP_DOWNLOAD, Package, collect_packages, run_fetcher
from megatron.data.recall_text import write_recall_corpus
from megatron.data.streams import decompressed, tar_members
from megatron.errors import DataError, DownloadError
from megatron.neox_arguments.yaml_files import parse_yaml, read_text

PILE = "https://the-eye.eu/public/AI/pile"
NOT_CORPUS_TEXT = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)


@dataclass(frozen=True)
class Source:
    """One corpus: description, licence, location and format.

    ``reader`` names a document splitter of megatron.data.chunks for its plain-text files (JSON
    lines carry their own documents). ``packages`` or ``collect`` replace the download for corpora
    that come from elsewhere.
    """

    name: str
    description: str
    licence: str
    reader: str = "file"
    files: tuple[RemoteFile, ...] = ()
    packages: tuple[Package, ...] = ()
    collect: Callable[[Path], list[Path]] | None = None
    small: bool = False  # byte-level tokens by default, which need no vocabulary file
    vocabulary: int | None = None  # size of the byte-pair vocabulary learned from it, if one is


def standard_library_files() -> list[Path]:
    """The running Python's library sources, sorted by module path; no tests, no installed packages.

    Build records of this very interpreter (``_sysconfigdata``) are left out: they differ between
    machines with the same Python.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        folders = relative.parts[:-1]
        if NOT_CORPUS_TEXT.intersection(folders) or path.name.startswith("_sysconfigdata"):
            continue
        if any(folder.startswith("config-") for folder in folders):
            continue
        found.append((relative.as_posix(), path))
    if not found:
        raise DataError(f"{root}: this Python has no library sources; pass text with --input")
    return [path for _, path in sorted(found)]


DJANGO = "Django==5.2.8"
DJANGO_SHA256 = "23254866a5bb9a2cfa6004e8b809ec6246eba4b58a7589bc2772f1bcc8456c7f"


def _django_docs(directory: Path) -> list[Path]:
    """English manual pages out of a source package that any Python package index serves."""
    directory.mkdir(parents=True, exist_ok=True)
    output = directory / "django_docs.jsonl"
    archive = directory / "django-5.2.8.tar.gz"
    if not (archive.is_file() and file_sha256(archive) == DJANGO_SHA256):
        command = [*PIP_DOWNLOAD, "--no-binary", ":all:", "--dest", ".", DJANGO]
        run_fetcher(command, directory, DJANGO)
        if not archive.is_file() or file_sha256(archive) != DJANGO_SHA256:
            raise DownloadError(f"{archive}: pip did not fetch the expected file")
    with archive.open("rb") as raw:
        pages = {
            name: stream.read().decode("utf-8", "replace")
            for name, stream in tar_members(decompressed(archive.name, raw))
            if "/docs/" in name and name.endswith(".txt")
        }
    write_json_lines(output, ({"text": pages[name], "path": name} for name in sorted(pages)))
    return [output]


def _pile_shards(numbers: range) -> tuple[RemoteFile, ...]:
    return tuple(
        RemoteFile(f"{i:02}.jsonl.zst", (f"{PILE}/train/{i:02}.jsonl.zst",)) for i in numbers
    )


_MADE_HERE: dict[str, dict[str, Any]] = {
    "pile": {"files": _pile_shards(range(30))},
    "pile_subset": {"files": _pile_shards(range(1))},
    "stdlib": {"collect": lambda directory: standard_library_files()},
    "django_docs": {"collect": _django_docs},
    "recall": {"collect": write_recall_corpus},
}
_TABLE = Path(__file__).with_name("corpora.yml")
SOURCES: dict[str, Source] = {
    name: TypeAdapter(Source).validate_python({"name": name, **entry, **_MADE_HERE.get(name, {})})
    for name, entry in parse_yaml(read_text(_TABLE), _TABLE.name).items()
}


def fetch(source: Source, directory: Path, *, progress: bool = True) -> list[Path]:
    """Local files of a corpus; if they cannot be downloaded, the error names alternatives."""
    try:
        if source.packages:
            return collect_packages(source.packages, directory)
        if source.collect is not None:
            return source.collect(directory)
        return [download(file, directory, progress=progress) for file in source.files]
    except DownloadError as error:
        raise DownloadError(
            f"{source.name}: {error}\nThe mirror no longer exists or this machine is offline. If "
            f"you have the text, pass it: prepare_data.py --input PATH {source.name} (jsonl, "
            f"jsonl.zst, txt, an archive, or a folder of any). `stdlib` needs no network at all."
        ) from error
