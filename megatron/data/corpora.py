"""The corpora of prepare_data.py in one table, and how each is fetched."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.atomic_files import write_json_lines
from megatron.data.download import RemoteFile, download, file_sha256
from megatron.data.package_text import PIP_DOWNLOAD, Package, collect_packages, run_fetcher
from megatron.data.recall_text import write_recall_corpus
from megatron.data.streams import decompressed, tar_members
from megatron.errors import DataError, DownloadError

PILE = "https://the-eye.eu/public/AI/pile"
COMPONENTS = "https://the-eye.eu/public/AI/pile_preliminary_components"
COMPONENTS_2 = "https://mystic.the-eye.eu/public/AI/pile_preliminary_components"
COMPONENTS_3 = "http://eaidata.bmk.sh/data"
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


STUDY_VOCABULARY = 4096
PYTHON_PROJECTS = (
    Package(
        "sympy",
        "1.13.3",
        "wheel",
        "BSD-3-Clause",
        (".py",),
        sha256="54612cf55a62755ee71824ce692986f23c88ffa77207b30c1368eda4a7060f73",
    ),
    Package(
        "Twisted",
        "24.10.0",
        "wheel",
        "MIT",
        (".py",),
        sha256="67aa7c8aa94387385302acf44ade12967c747858c8bcce0f11d38077a11c5326",
    ),
)
ENGLISH_DOCS = (
    Package(
        "anarchism",
        "15.3-3",
        "debian",
        "GPL-2+ or GFDL-1.3+",
        (".md",),
        below="/markdown/",
        sha256="cf21c10948b00e923c62eb31c39a3390413fa26c5ee0e3b925feb0ec7fe42948",
    ),
    Package("perl-doc", "5.36.0", "debian", "Artistic or GPL-1+", (".pod",)),
    Package("python3.11-doc", "3.11.2", "debian", "PSF", (".rst.txt",), below="/_sources/"),
)
LATEX_DOCS = tuple(
    Package(
        f"texlive-{name}-doc",
        version,
        "debian",
        "each package's own, mostly LPPL",
        (".tex",),
        sha256=sha256,
    )
    for name, version, sha256 in (
        ("publishers", "2022.20230122-4",
         "9b632913d4b0d0871bef41c414fc7ce1167e3bacb55b140901df0c95df1c5765"),
        ("science", "2022.20230122-4",
         "0e0fcc74646b916402124e8394a7a8d896e1c959cd9b184b0d7a61e08c6e72db"),
        ("pictures", "2022.20230122-3",
         "9f24a348a9461952e09cac3a2c5e1617f00e9054bea1ab1a124a724cc7f40751"),
    )
)  # fmt: skip


def _pile_shards(numbers: range) -> tuple[RemoteFile, ...]:
    return tuple(
        RemoteFile(f"{i:02}.jsonl.zst", (f"{PILE}/train/{i:02}.jsonl.zst",)) for i in numbers
    )


def _component(name: str, sha256: str, *bases: str) -> tuple[RemoteFile, ...]:
    return (RemoteFile(name, tuple(f"{base}/{name}" for base in bases), sha256),)


SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source(
            "openwebtext2",
            "OpenWebText2, web pages linked from Reddit, as in the Pile (about 27 GB)",
            "none stated for the pages; the collection is MIT",
            files=_component(
                "openwebtext2.jsonl.zst.tar",
                "9043d1b93c35ff1a38a17e16c73c009d4617dcaab6da15adc0faf4779739a027",
                COMPONENTS,
                COMPONENTS_2,
                COMPONENTS_3,
            ),
        ),
        Source(
            "github",
            "GitHub, the Pile's code subset (about 106 GB)",
            "each repository's own",
            files=(
                RemoteFile(
                    "github.jsonl.zst.tar",
                    (f"{COMPONENTS}/github.tar", f"{COMPONENTS_3}/github.tar"),
                    "f7a66e8226baf075a42628d10d8eba234460da73b0ffd300736036db9be3b3c3",
                ),
            ),
        ),
        Source(
            "arxiv",
            "ArXiv, the Pile's LaTeX subset",
            "each paper's own",
            files=_component(
                "arxiv.jsonl.zst",
                "084b894f513986076a7d97e5c323c7fa8ebef1733f151a7fbdb139c19c07b571",
                COMPONENTS_3,
            ),
        ),
        Source(
            "enwik8",
            "the first 100 MB of an English Wikipedia dump, one document a page",
            "CC BY-SA 3.0 and GFDL",
            reader="wiki_pages",
            files=(
                RemoteFile(
                    "enwik8.zip",
                    (
                        "https://mattmahoney.net/dc/enwik8.zip",
                        "https://data.deepai.org/enwik8.zip",
                    ),
                    "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
                    36_445_475,
                ),
            ),
        ),
        Source(
            "wikitext103",
            "WikiText-103 (raw), good Wikipedia articles, one document an article",
            "CC BY-SA 3.0",
            reader="wikitext_articles",
            files=(
                RemoteFile(
                    "wikitext-103-raw-v1.zip",
                    (
                        "https://wikitext.smerity.com/wikitext-103-raw-v1.zip",
                        "https://s3.amazonaws.com/research.metamind.io/wikitext/"
                        "wikitext-103-raw-v1.zip",
                    ),
                    "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
                    191_984_949,
                ),
            ),
        ),
        Source(
            "enron",
            "Enron emails, as in the Pile",
            "public record",
            files=(
                RemoteFile("enron_emails.jsonl.zst", (f"{COMPONENTS_3}/enron_emails.jsonl.zst",)),
            ),
        ),
        Source(
            "pile",
            "the Pile, all 30 training shards",
            "each part's own",
            files=_pile_shards(range(30)),
        ),
        Source(
            "pile_subset",
            "the Pile's first training shard",
            "each part's own",
            files=_pile_shards(range(1)),
        ),
        Source(
            "stdlib",
            "source code of the running Python's standard library, no download",
            "PSF",
            collect=lambda directory: standard_library_files(),
            small=True,
        ),
        Source(
            "django_docs",
            "English: the manual of Django 5.2.8 (6 MB), from its source package through pip",
            "BSD-3-Clause",
            collect=_django_docs,
            small=True,
        ),
        Source(
            "recall",
            "made up: associative recall and passkeys in noise, 60,000 documents of 128 bytes",
            "none needed",
            collect=write_recall_corpus,
            small=True,
        ),
        Source(
            "python_projects",
            "code: the Python sources of SymPy 1.13.3 and Twisted 24.10.0 (38 MB), through pip",
            "BSD-3-Clause, MIT",
            packages=PYTHON_PROJECTS,
            vocabulary=STUDY_VOCABULARY,
        ),
        Source(
            "english_docs",
            "English: An Anarchist FAQ, the manuals of Perl and Python (31 MB), through apt-get "
            "on Debian 12",
            "GPL-2+ or GFDL-1.3+, Artistic or GPL-1+, PSF",
            packages=ENGLISH_DOCS,
            vocabulary=STUDY_VOCABULARY,
        ),
        Source(
            "latex_docs",
            "LaTeX: manuals and sample articles of TeX Live's packages (33 MB of 530 MB "
            "downloaded), through apt-get on Debian 12",
            "each package's own, mostly LPPL",
            packages=LATEX_DOCS,
            vocabulary=STUDY_VOCABULARY,
        ),
    )
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
