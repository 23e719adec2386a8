"""Downloads that resume after an interruption and are verified before use.

The bytes go to ``name.part``; beside it ``name.part.json`` keeps what identifies them (address,
ETag, length), so that a resumed download never joins two different files. A finished file has
``name.ok.json`` with its length and sha256.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.atomic_files import publish, read_json, write_json
from megatron.data.streams import progress_in_bytes
from megatron.errors import DownloadError

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 30.0
ATTEMPTS = 4
PAUSE_SECONDS = 1.0
BLOCK = 1 << 20
USER_AGENT = "kerple-neox/1 (dataset download)"
NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, OSError)


@dataclass(frozen=True)
class RemoteFile:
    """A file, its mirrors in order of preference, and what is known to verify it."""

    name: str
    urls: tuple[str, ...]
    sha256: str | None = None
    size: int | None = None


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while block := handle.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def download(remote: RemoteFile, directory: Path, *, progress: bool = True) -> Path:
    """The verified local copy of ``remote``; fetched, resumed or already there."""
    target = directory / remote.name
    if _is_verified(target, remote):
        return target
    directory.mkdir(parents=True, exist_ok=True)
    failures = []
    for url in remote.urls:
        try:
            _check_address(url, remote)
            part = _fetch(url, target, progress)
            return _accept(part, target, remote, url)
        except DownloadError as error:
            failures.append(f"  {error}")
            log.warning("%s", error)
    raise DownloadError(f"{remote.name} could not be downloaded:\n" + "\n".join(failures))


def _check_address(url: str, remote: RemoteFile) -> None:
    """Plain http is not authenticated: such a file must have a known hash."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise DownloadError(f"{url}: only http and https are fetched")
    local = parts.hostname in ("127.0.0.1", "localhost")
    if parts.scheme == "http" and remote.sha256 is None and not local:
        raise DownloadError(
            f"{url}: not downloaded, because it comes over plain http without a published hash and "
            "cannot be verified. Download it yourself from a source you trust and pass --input."
        )


def _is_verified(target: Path, remote: RemoteFile) -> bool:
    note = read_json(Path(f"{target}.ok.json"))
    if note is None or not target.is_file():
        return False
    same_size = note.get("size") == target.stat().st_size
    return same_size and remote.sha256 in (None, note.get("sha256"))


def _fetch(url: str, target: Path, progress: bool) -> Path:
    """Fetch ``target.part`` to full length, in several attempts if the connection breaks."""
    part = Path(f"{target}.part")
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            if _continue(url, target, progress):
                return part
            reason = "the connection was cut"
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise DownloadError(f"{url}: HTTP {error.code} {error.reason}") from error
            reason = f"HTTP {error.code} {error.reason}"
        except NETWORK_ERRORS as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        got_further = part.exists() and part.stat().st_size > before
        failures = 0 if got_further else failures + 1
        if failures >= ATTEMPTS or (failures and before == 0 and "refused" in reason):
            raise DownloadError(f"{url}: {reason}")
        time.sleep(PAUSE_SECONDS)


def _continue(url: str, target: Path, progress: bool) -> bool:
    """One request from where the partial file ends; True when the whole file is there."""
    part, note_path = Path(f"{target}.part"), Path(f"{target}.part.json")
    note = read_json(note_path)
    if note and note.get("url") != url:
        note = None
    start = part.stat().st_size if part.exists() and note else 0
    if note and note["total"] is not None and start == note["total"]:
        return True
    headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
        if note and note["identity"]:
            headers["If-Range"] = note["identity"]
    request = urllib.request.Request(url, headers=headers)  # noqa: S310  # scheme checked
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:  # noqa: S310
        start, total = _position(response, start)
        identity = response.headers.get("ETag") or response.headers.get("Last-Modified")
        write_json(note_path, {"url": url, "total": total, "identity": identity})
        bar = progress_in_bytes(total, target.name, progress, done=start)
        with part.open("r+b" if start else "wb") as handle, bar:
            handle.truncate(start)
            handle.seek(start)
            while block := response.read(BLOCK):
                handle.write(block)
                bar.update(len(block))
            handle.flush()
            os.fsync(handle.fileno())
    return total is None or part.stat().st_size == total


def _position(response: Any, wanted: int) -> tuple[int, int | None]:
    """The offset that the server sends from, and the length of the whole file if it is given."""
    length = response.headers.get("Content-Length")
    if response.status == 206:
        span, _, total = response.headers.get("Content-Range", "").partition("/")
        first = span.removeprefix("bytes ").partition("-")[0]
        if first != str(wanted):
            raise DownloadError(f"{response.url}: answered another range than was requested")
        return wanted, int(total) if total.isdigit() else None
    return 0, int(length) if length is not None else None


def _accept(part: Path, target: Path, remote: RemoteFile, url: str) -> Path:
    """Verify the finished file; one that is wrong is removed, so that it is not resumed."""
    size = part.stat().st_size
    digest = file_sha256(part)
    problems = []
    if remote.size not in (None, size):
        problems.append(f"{size} bytes instead of {remote.size}")
    if remote.sha256 not in (None, digest):
        problems.append(f"sha256 {digest} instead of {remote.sha256}")
    note = Path(f"{target}.part.json")
    if problems:
        part.unlink()
        note.unlink(missing_ok=True)
        raise DownloadError(f"{url}: not the expected file ({'; '.join(problems)}); removed")
    if remote.sha256 is None:
        log.warning("%s has no published hash to compare with; what came has %s", url, digest)
    publish(part, target)
    note.unlink(missing_ok=True)
    write_json(Path(f"{target}.ok.json"), {"url": url, "size": size, "sha256": digest})
    return target
