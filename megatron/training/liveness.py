"""A dead rank is noticed, named and ends the job.

Every rank writes a heartbeat to the job's key-value store from a thread of its own. Whoever finds a
peer dead (its process is gone from this host, or its heart has been silent for the configured
timeout) says which rank that was and ends its own process. Collectives that fail because a peer is
gone come to `explain`, which finds the rank by the same means.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

EXIT_PEER_LOST = 77
INTERVAL = 1.0  # seconds between heartbeats
FAREWELL = "done"


@dataclass(frozen=True)
class Beat:
    """What a rank last wrote."""

    count: int
    host: str
    pid: int
    boot: str

    @classmethod
    def read(cls, raw: bytes) -> Beat | None:
        if raw.decode() == FAREWELL:
            return None
        count, host, pid, boot = raw.decode().split()
        return cls(int(count), host, int(pid), boot)


def _boot_id() -> str:
    """Two containers may share a host name, never this and a process table."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + namespace
    except OSError:
        return "unknown"


def process_is_gone(pid: int) -> bool:
    """Whether a process of this host has ended, reaped or not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return Path("/proc/self/stat").exists()
    except OSError:
        return False
    return state in "ZX"


class Heartbeat:
    """The thread that writes this rank's beat and watches those of the others."""

    def __init__(self, timeout_seconds: float) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.timeout = timeout_seconds
        self._own = f"{socket.gethostname()} {os.getpid()} {_boot_id()}"
        self._stop = threading.Event()
        self._seen: dict[int, tuple[Beat, float]] = {}
        # A connection of its own: the default store is busy while a collective waits in it.
        self._store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=10),
        )
        self._count = 0
        self._lock = threading.Lock()
        self._beat()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self, *, finished: bool) -> None:
        """Stop beating; after a good end say farewell, so that the silence alarms nobody."""
        self._stop.set()
        self._thread.join(timeout=5)
        if not finished:
            return
        try:
            self._store.set(self._key(self.rank), FAREWELL)
        except RuntimeError:
            return  # the rank that keeps the store has left already

    def find_dead(self, patience: float = 10.0) -> str | None:
        """Name a rank that is dead, watching for up to `patience` seconds; None if all live."""
        end = time.monotonic() + patience
        while time.monotonic() < end:
            try:
                with self._lock:
                    dead = self._look(silence=patience / 2)
            except RuntimeError:
                return "rank 0, which keeps the job's store, cannot be reached"
            if dead is not None:
                return dead
            time.sleep(INTERVAL / 2)
        return None

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            try:
                with self._lock:
                    self._beat()
                    dead = self._look(silence=self.timeout)
            except RuntimeError:
                dead = "rank 0, which keeps the job's store, cannot be reached"
            if dead is not None and not self._stop.is_set():
                self._end(dead)

    def _end(self, dead: str) -> None:
        # The main thread may get the same news from a failed collective, and can say more.
        time.sleep(5 * INTERVAL)
        if self._stop.is_set():
            return
        _say(self.rank, dead)
        os._exit(EXIT_PEER_LOST)

    def _beat(self) -> None:
        self._count += 1
        self._store.set(self._key(self.rank), f"{self._count} {self._own}")

    def _look(self, silence: float) -> str | None:
        now = time.monotonic()
        for rank in range(self.world_size):
            if rank == self.rank or not self._store.check([self._key(rank)]):
                continue
            beat = Beat.read(self._store.get(self._key(rank)))
            if beat is None:
                self._seen.pop(rank, None)
                continue
            last, since = self._seen.get(rank, (None, now))
            if last is None or last.count != beat.count:
                self._seen[rank] = (beat, now)
                since = now
            place = f"rank {rank} (process {beat.pid} on {beat.host})"
            if beat.boot == self._own.split()[2] != "unknown" and process_is_gone(beat.pid):
                return f"{place} has died"
            if now - since > silence:
                return f"{place} has been silent for {now - since:.0f} s"
        return None

    @staticmethod
    def _key(rank: int) -> str:
        return f"kerple/heartbeat/{rank}"


def _say(rank: int, dead: str) -> None:
    print(
        f"error (rank {rank}): {dead}; ending this rank. "
        "Checkpoints are complete: start the job again to continue from the newest.",
        file=sys.stderr,
        flush=True,
    )


def start_heartbeat(timeout_minutes: float) -> Heartbeat | None:
    """A heartbeat for jobs of several processes."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return Heartbeat(timeout_minutes * 60)


def explain(heartbeat: Heartbeat | None, error: BaseException) -> bool:
    """Whether `error` came from a lost peer; if so, it has been named."""
    if heartbeat is None or not _is_communication_error(error):
        return False
    dead = heartbeat.find_dead()
    if dead is not None:
        _say(heartbeat.rank, dead)
    return dead is not None


def _is_communication_error(error: BaseException | None) -> bool:
    kinds: tuple[Any, ...] = (dist.DistError,)
    words = ("gloo", "nccl", "connection", "socket", "timed out", "peer", "store")
    while error is not None:
        text = str(error).lower()
        if isinstance(error, kinds) or (
            isinstance(error, RuntimeError) and any(word in text for word in words)
        ):
            return True
        error = error.__cause__
    return False
