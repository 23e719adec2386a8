"""The finished runs of a suite in one file, small enough for a repository: no checkpoints, no logs.

`SUITE/RUN/...` inside a gzipped tar. `report` and `status` read it in place of a folder of runs;
unpacked into one, its runs count as finished, so that another machine goes on from there::

    tools/reproduce.py pack --suite study --out docs/results/study/runs.tar.gz
    tools/reproduce.py report --suite study --runs docs/results/study/runs.tar.gz
    tar xf docs/results/study/runs.tar.gz -C runs        # elsewhere, then `run` as usual

The same runs give the same bytes.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from zlib import error as ZlibError

from megatron.atomic_files import atomic_writer, read_json
from megatron.errors import ReproduceError
from megatron.paper.result_fit import is_finished
from megatron.paper.run_files import read_state
from megatron.paper.suite import Run, Suite

SUFFIX = ".tar.gz"
_FILES = ("config.yml", "run.json", "metrics.jsonl")
_MOST_BYTES = 2 << 30
"""Of an archive's content: a small hostile file may unpack to a full disk."""


def pack_runs(suite: Suite, target: Path) -> list[str]:
    """Write the finished runs of a suite to `target`; their names."""
    if not target.name.endswith(SUFFIX):
        raise ReproduceError(f"--out {target}: expected a name that ends in {SUFFIX}")
    finished = [run for run in suite.runs if is_finished(run)]
    if not finished:
        raise ReproduceError(
            f"{suite.directory}: none of the suite's {len(suite.runs)} runs is finished there, so "
            "nothing is packed; see `status`, or give another --runs"
        )
    _check_replaced(suite, {run.name for run in finished}, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        atomic_writer(target) as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for run in sorted(finished, key=lambda run: run.name):
            for name, content in _content(run):
                entry = tarfile.TarInfo(f"{suite.name}/{run.name}/{name}")
                entry.size, entry.mode = len(content), 0o644
                archive.addfile(entry, io.BytesIO(content))
    return [run.name for run in finished]


def _check_replaced(suite: Suite, names: set[str], target: Path) -> None:
    """ReproduceError if a file in the place holds finished runs that the new one would not."""
    if not target.exists():
        return
    with unpacked(target) as folder:
        held = {path.name for path in (folder / suite.name).glob("*") if path.is_dir()}
    if lost := sorted(held - names):
        shown = f"{', '.join(lost[:3])}{', ...' if len(lost) > 3 else ''}"
        raise ReproduceError(
            f"--out {target}: holds runs that {suite.directory} has not finished: {shown}; unpack "
            "it there first with `tar xf`, or choose another name"
        )


def _content(run: Run) -> Iterator[tuple[str, bytes]]:
    folder = run.directory
    for name in _FILES:
        yield name, (folder / name).read_bytes()
    # Without the process and the machine: archives are published.
    state = replace(read_state(folder), process=None, host="")
    yield "state.json", json.dumps(state.__dict__, indent=1).encode() + b"\n"
    for path in sorted((folder / ".done").glob("*.json")):
        yield f".done/{path.name}", path.read_bytes()
    for path in sorted((folder / "results").glob("*.json")):
        content = read_json(path)
        if content is None:
            raise ReproduceError(f"{path}: not a result file; delete it or evaluate again")
        yield f"results/{path.name}", json.dumps(content, separators=(",", ":")).encode() + b"\n"


@contextmanager
def unpacked(archive: Path) -> Iterator[Path]:
    """A temporary folder with the runs of an archive."""
    with tempfile.TemporaryDirectory(prefix="kerple-runs-") as folder:
        try:
            with tarfile.open(archive, "r:gz") as packed:
                _extract(packed, Path(folder))
        except (tarfile.TarError, OSError, EOFError, ZlibError, ValueError) as error:
            raise ReproduceError(f"{archive}: not an archive of runs ({error})") from error
        yield Path(folder)


def _extract(packed: tarfile.TarFile, folder: Path) -> None:
    """Regular files below the folder only: an archive may be hostile."""
    left = _MOST_BYTES
    for entry in packed:
        name = PurePosixPath(entry.name)
        if entry.isdir():
            continue
        if not entry.isreg() or name.is_absolute() or ".." in name.parts:
            raise tarfile.TarError(f"{entry.name!r:.80} is not a regular file of a run")
        left -= entry.size
        if left < 0:
            raise tarfile.TarError(f"its content exceeds {_MOST_BYTES >> 30} GiB")
        content = packed.extractfile(entry)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is not None:
            path.write_bytes(content.read())
