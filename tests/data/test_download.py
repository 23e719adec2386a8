"""Downloads from a server on this machine that can be made to misbehave."""

from __future__ import annotations

import hashlib
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.data import download as download_module
from megatron.data.download import RemoteFile, download
from megatron.errors import DownloadError

CONTENT = bytes(range(256)) * 4000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves ``content``; can cut connections, ignore ranges, fail, or change its file."""

    content = CONTENT
    cut_after: int | None = None
    ranges = True
    failures = 0
    etag = '"one"'

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/file"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.requests.append(wanted)
        if self.path != "/file":
            self.send_error(404)
            return
        if self.server.failures:
            self.server.failures -= 1
            self.send_error(503)
            return
        content, start = self.server.content, 0
        current = self.headers.get("If-Range") in (None, self.server.etag)
        if wanted and self.server.ranges and current:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("ETag", self.server.etag)
        self.end_headers()
        end = len(content) if self.server.cut_after is None else start + self.server.cut_after
        self.wfile.write(content[start:end])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(download_module, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(download_module, "TIMEOUT_SECONDS", 5.0)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    running = Server()
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield running
    running.shutdown()
    running.server_close()


def get(server: Server, folder: Path, **known: object) -> Path:
    remote = RemoteFile("file.bin", (server.url,), **known)  # type: ignore[arg-type]
    return download(remote, folder, progress=False)


def test_a_file_arrives_and_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    path = get(server, tmp_path, sha256=SHA256, size=len(CONTENT))
    assert path.read_bytes() == CONTENT
    get(server, tmp_path, sha256=SHA256)
    assert len(server.requests) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file.bin", "file.bin.ok.json"]


def test_all_of_it_is_written_before_it_is_synced(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, int]] = []

    def sync(number: int) -> None:
        name = Path(f"/proc/self/fd/{number}").resolve().name
        synced.append((name, os.fstat(number).st_size))

    monkeypatch.setattr(os, "fsync", sync)
    server.content = CONTENT[:1000]  # less than a buffer
    get(server, tmp_path)
    assert {size for name, size in synced if name == "file.bin.part"} == {1000}


def test_a_cut_connection_is_resumed(server: Server, tmp_path: Path) -> None:
    server.cut_after = 300_000
    assert get(server, tmp_path, sha256=SHA256).read_bytes() == CONTENT
    assert server.requests == [None, "bytes=300000-", "bytes=600000-", "bytes=900000-"]


def test_a_later_run_continues_where_the_first_was_stopped(server: Server, tmp_path: Path) -> None:
    server.cut_after = 0
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])  # left by a run that was killed
    (tmp_path / "file.bin.part.json").write_text(
        f'{{"url": "{server.url}", "total": {len(CONTENT)}, "identity": "\\"one\\""}}'
    )
    with pytest.raises(DownloadError):
        get(server, tmp_path)
    server.cut_after = None
    server.requests.clear()
    assert get(server, tmp_path, sha256=SHA256).read_bytes() == CONTENT
    assert server.requests == ["bytes=1000-"]


def test_a_file_that_changed_meanwhile_is_not_joined(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(b"older file")
    (tmp_path / "file.bin.part.json").write_text(
        f'{{"url": "{server.url}", "total": 100, "identity": "\\"zero\\""}}'
    )
    assert get(server, tmp_path).read_bytes() == CONTENT


def test_a_partial_file_of_unknown_origin_is_not_used(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(b"whatever")
    assert get(server, tmp_path).read_bytes() == CONTENT
    assert server.requests == [None]


def test_a_server_without_ranges_starts_again(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    (tmp_path / "file.bin.part.json").write_text(
        f'{{"url": "{server.url}", "total": {len(CONTENT)}, "identity": "\\"one\\""}}'
    )
    assert get(server, tmp_path, sha256=SHA256).read_bytes() == CONTENT


def test_a_busy_server_is_asked_again(server: Server, tmp_path: Path) -> None:
    server.failures = 2
    assert get(server, tmp_path).read_bytes() == CONTENT


def test_a_wrong_checksum_is_an_error_and_the_file_is_gone(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=f"sha256 {SHA256} instead of 00"):
        get(server, tmp_path, sha256="00")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DownloadError, match="bytes instead of 5"):
        get(server, tmp_path, size=5)


def test_the_next_mirror_is_tried(server: Server, tmp_path: Path) -> None:
    gone = server.url.replace("/file", "/gone")
    path = download(RemoteFile("file.bin", (gone, server.url), SHA256), tmp_path, progress=False)
    assert path.read_bytes() == CONTENT


def test_all_failures_are_listed(server: Server, tmp_path: Path) -> None:
    urls = (server.url.replace("/file", "/gone"), "http://127.0.0.1:9/x", "file:///etc/hostname")
    with pytest.raises(DownloadError) as error:
        download(RemoteFile("file.bin", urls), tmp_path, progress=False)
    message = str(error.value)
    assert len(server.requests) == 1  # what is not there is not asked for again
    assert "HTTP 404" in message and "refused" in message and "only http" in message


def test_plain_http_without_a_hash_is_not_fetched(tmp_path: Path) -> None:
    remote = RemoteFile("file", ("http://example.invalid/file",))
    with pytest.raises(DownloadError, match="cannot be verified"):
        download(remote, tmp_path, progress=False)
