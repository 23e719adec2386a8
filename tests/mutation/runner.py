"""One process that has imported what takes seconds, and forks for each run of tests.

A program of its own, so that neither megatron nor the tests are imported before the fork: the fork
imports them from the checkout it is in, broken or not. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

PRELOADED = (
    "pytest",
    "hypothesis",
    "yaml",
    "zstandard",
    "torch",
    "torch._dynamo",
    "torch._inductor.utils",
    "torch.distributed.tensor",
    "torch.onnx",
    "deepspeed.module_inject",
    "deepspeed.runtime.pipe.engine",
    "safetensors.torch",
    "tokenizers",
    "transformers.modeling_utils",
)
GIGABYTE = 1 << 30


class Failed:
    """A pytest plugin: the first test that fails."""

    name = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.pytest_collectreport(report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid


def answer(request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """The tests of a request in a forked process: whether they pass, and which one fails."""
    failed = scratch / "failed.txt"
    failed.unlink(missing_ok=True)
    begin = time.monotonic()
    process = os.fork()
    if process == 0:
        _run(request, scratch, failed)
    status = None
    while status is None and time.monotonic() - begin < request["timeout"]:
        ended, code = os.waitpid(process, os.WNOHANG)
        status = code if ended else None
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    if status is None:
        os.waitpid(process, 0)
    outcome = "time" if status is None else "passed" if status == 0 else "failed"
    name = failed.read_text() if failed.is_file() else ""
    return {"outcome": outcome, "failed": name, "seconds": time.monotonic() - begin}


def _run(request: dict[str, Any], scratch: Path, failed: Path) -> None:
    code = 70
    try:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (GIGABYTE, GIGABYTE))
        resource.setrlimit(resource.RLIMIT_DATA, (8 * GIGABYTE, 8 * GIGABYTE))
        output = os.open(scratch / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(output, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.path.insert(0, str(Path.cwd()))
        _serve_forked_ranks()
        import pytest

        words = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short"]
        words += ["-m", "not slow and not slurm", f"--basetemp={scratch / 'temporary'}"]
        plugin = Failed()
        code = int(pytest.main([*words, *request["tests"]], plugins=[plugin]))
        failed.write_text(plugin.name)
    finally:
        sys.stdout.flush()
        os._exit(code)


class _Running:
    """What tests.forked_ranks asks of its server's process."""

    def poll(self) -> None:
        return None


def _serve_forked_ranks() -> None:
    """The server of tests/forked_ranks.py, forked from here instead of started anew."""
    from tests import forked_ranks

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        theirs.recv(1, socket.MSG_PEEK)  # most tests start no ranks: import nothing before one does
        os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", PYTHONPATH="")
        try:
            forked_ranks.serve(theirs)
        finally:
            os._exit(0)
    theirs.close()
    forked_ranks.OWN._running = _Running(), ours  # type: ignore[assignment]


def main() -> None:
    scratch = Path(sys.argv[1])
    sys.path.pop(0)  # this file's folder
    for name in PRELOADED:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads: a process with threads cannot be forked safely"
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), scratch)), flush=True)


if __name__ == "__main__":
    main()
