"""Start ranks by forking a process that has imported torch, DeepSpeed and the training package.

A rank that is started afresh spends three CPU seconds on these imports. The server (this file as a
program) imports them once for each pytest process and forks for each rank; a rank then runs its
script with its own environment, arguments, working directory and output, as `python SCRIPT` does.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
_MOST = 1 << 20  # bytes of a request
_PRELOADED = (
    "megatron.training.entry",
    "deepspeed.module_inject",
    "deepspeed.runtime.pipe.engine",
    "torch._dynamo",  # by torch.optim
    "torch._inductor.utils",
    "torch.distributed.tensor",
    "torch.onnx",
)
"""What takes seconds, the parts that DeepSpeed and torch import late included."""


class Server:
    """The process that forks, started for the first rank; `enter` before it runs it elsewhere.

    A test that kills all children ends the server, and the next rank starts another.
    """

    def __init__(self, enter: Sequence[str] = ()) -> None:
        self._enter = list(enter)
        self._running: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def connection(self) -> socket.socket:
        if self._running is not None and self._running[0].poll() is None:
            return self._running[1]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = [sys.executable, "-m", "tests.forked_ranks", str(theirs.fileno())]
        process = subprocess.Popen(
            [*self._enter, *program],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._running = process, ours
        return ours

    def pid_here(self, pid: int) -> int:
        """What this process calls a rank that the server calls `pid`."""
        return pid


OWN = Server()


class ForkedRank(subprocess.Popen[str]):
    """The Popen of a process whose parent is the server: its status comes through a pipe."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], server: Server = OWN
    ) -> None:
        self.args, self.returncode, self.stdin, self.stderr = list(arguments), None, None, None
        self._child_created, self._input, self._communication_started = False, None, False
        self.text_mode, self.encoding, self.errors = True, None, None
        self._waitpid_lock, self._sigint_wait_secs = threading.Lock(), 0.0
        output, output_end = os.pipe()
        self._status, status_end = os.pipe()
        request = {"arguments": self.args, "environment": dict(environment)}
        connection = server.connection()
        socket.send_fds(connection, [json.dumps(request).encode()], [output_end, status_end])
        os.close(output_end)
        os.close(status_end)
        self.stdout = open(output, encoding="utf-8")  # noqa: PTH123, SIM115 - as Popen's
        self.pid = server.pid_here(int(connection.recv(64)))
        self._child_created = True

    def _internal_poll(self, _deadstate: Any = None, **_: Any) -> int | None:
        return self._wait(0, wait_always=False)

    def _wait(self, timeout: float | None, wait_always: bool = True) -> int | None:
        if self.returncode is None:
            ready, _, _ = select.select([self._status], [], [], timeout)
            if ready:
                text = os.read(self._status, 64)
                os.close(self._status)
                self.returncode = int(text) if text else -signal.SIGKILL
            elif wait_always:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode


# In the server.


def serve(connection: socket.socket) -> None:
    """Fork for every request until pytest closes the connection."""
    from megatron.terminal import quiet_libraries

    quiet_libraries()
    for name in _PRELOADED:
        importlib.import_module(name)
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads: a process with threads cannot be forked safely"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the supervisors
    while True:
        content, files, _, _ = socket.recv_fds(connection, _MOST, 2)
        if not content:
            return
        output, status = files
        if os.fork() == 0:
            _supervise(json.loads(content), output, status, connection)
        os.close(output)
        os.close(status)


def _supervise(request: dict[str, Any], output: int, status: int, connection: Any) -> None:
    """Fork the rank, report its process id, wait for it, report its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    rank = os.fork()
    if rank == 0:
        connection.close()
        os.close(status)
        _run(request["arguments"], request["environment"], output)
    os.close(output)
    connection.send(str(rank).encode())
    connection.close()
    code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    os.write(status, str(code).encode())
    os._exit(0)


def _run(arguments: list[str], environment: dict[str, str], output: int) -> None:
    """What `python SCRIPT ARGUMENTS...` does, in this process."""
    import random
    import runpy

    import numpy as np

    from megatron.terminal import exit_with

    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    np.random.seed()
    sys.argv = arguments
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [str(Path(arguments[0]).resolve().parent), *given]
    exit_with(lambda: runpy.run_path(arguments[0], run_name="__main__") and None)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
