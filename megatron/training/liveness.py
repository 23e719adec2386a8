"""Heartbeats: a dead rank is detected, named, and ends the job.

Every rank writes a heartbeat to the job's key-value store from a thread of its own and watches the
next rank only, so that the store has a handful of requests a second from each, however many there
are. A rank that finds the next one dead (its process is gone from this host, or it has not written
for the configured timeout) writes that to the store; each rank reads it, names the dead rank and
exits. When a collective fails because a peer is gone, `explain` finds the rank in the same way. A
rank that waits for the store's host itself (the link is down, the process is stopped) is ended by a
second thread, which makes no request to the store.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from megatron.launcher.environment import GLOO_INTERFACE, rank_place, spans_hosts

EXIT_PEER_LOST = 77
INTERVAL = 1.0  # seconds between heartbeats
FINISHED_BEAT = "done"  # of a rank that has ended on purpose
DEAD = "kerple/dead"  # where the first rank that finds a dead one writes which

ENDED = re.compile(r"ended with code (\d+)")  # there, if it was an error of that rank


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
    """The thread that writes this rank's beat and watches the next rank's."""

    def __init__(self, rank: int, world_size: int, timeout_seconds: float, store: Any) -> None:
        self.rank, self.world_size = rank, world_size
        self.timeout = timeout_seconds
        self._boot = _boot_id()
        self._own = f"{socket.gethostname()} {os.getpid()} {self._boot}"
        self._stop = threading.Event()
        self._store = store
        self._watched = (rank + 1) % world_size
        self._last: tuple[int, float] | None = None  # the watched rank's count, and when
        self._count = 0
        self.code = EXIT_PEER_LOST  # of this rank when a peer is lost
        self._lock = threading.Lock()
        self._answered = time.monotonic()  # when the store last answered
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._guard = threading.Thread(target=self._bound_waits, name="guard", daemon=True)

    def start(self) -> None:
        self._answered = time.monotonic()
        self._guard.start()
        self.turn(silence=self.timeout)
        self._thread.start()

    def stop(self, *, finished: bool) -> None:
        """Stop; when `finished`, tell peers that this rank exits on purpose, not that it died."""
        self._stop.set()
        self._thread.join(timeout=5)
        if not finished:
            return
        try:
            self._store.set(self._key(self.rank), FINISHED_BEAT)
        except RuntimeError:
            return  # the rank that keeps the store has left already

    def tell_code(self, code: int) -> None:
        """Tell peers that this rank ends with `code` by an error that it has printed.

        They end with the same one: srun returns the highest, and EXIT_PEER_LOST would hide it. The
        rank that keeps the store stays until the others have looked.
        """
        self._stop.set()
        with contextlib.suppress(RuntimeError):
            place = f"rank {self.rank} on {socket.gethostname()}"
            self._store.set(DEAD, f"{place} ended with code {code}; see its error")
            if self.rank == 0:
                time.sleep(2 * INTERVAL)

    def find_dead(self, patience: float = 10.0) -> str | None:
        """Name a rank that is dead, watching for up to `patience` seconds; None if all live."""
        end = time.monotonic() + patience
        while time.monotonic() < end:
            try:
                dead = self.turn(silence=patience / 2)
            except RuntimeError:
                return "rank 0, which keeps the job's store, cannot be reached"
            if dead is not None:
                return dead
            time.sleep(INTERVAL / 2)
        return None

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            try:
                dead = self.turn(silence=self.timeout)
            except RuntimeError:
                dead = "rank 0, which keeps the job's store, cannot be reached"
            if dead is not None and not self._stop.is_set():
                self._end(dead)

    def _bound_waits(self) -> None:
        """End this rank when the store has not answered for the timeout.

        The store's client waits without bound for a host that neither answers nor closes, with the
        lock of `turn` held, for which `find_dead` then waits too.
        """
        while not self._stop.wait(INTERVAL):
            quiet = time.monotonic() - self._answered
            if quiet > self.timeout + 5 * INTERVAL:
                _print_death(
                    self.rank,
                    f"rank 0, which keeps the job's store, has not answered for {quiet:.0f} s",
                )
                os._exit(EXIT_PEER_LOST)

    def _end(self, dead: str) -> None:
        # The main thread may learn the same from a failed collective, with more details.
        time.sleep(5 * INTERVAL)
        if self._stop.is_set():
            return
        _print_death(self.rank, dead)
        os._exit(self.code)

    def turn(self, silence: float) -> str | None:
        """Write one heartbeat and check the watched rank once; the dead rank, if one is known."""
        with self._lock:
            self._count += 1
            self._store.set(self._key(self.rank), f"{self._count} {self._own}")
            if self._store.check([DEAD]):
                told = str(self._store.get(DEAD).decode(errors="replace"))
                if match := ENDED.search(told):
                    self.code = int(match[1])
                return told
            dead = self._check_watched_rank(silence)
            if dead is not None:
                self._store.set(DEAD, dead)
            self._answered = time.monotonic()
            return dead

    def _check_watched_rank(self, silence: float) -> str | None:
        rank, now = self._watched, time.monotonic()
        if rank == self.rank or not self._store.check([self._key(rank)]):
            return None
        raw = self._store.get(self._key(rank))
        if raw == FINISHED_BEAT.encode():  # it has finished: watch the one behind it
            self._watched, self._last = (rank + 1) % self.world_size, None
            return None
        try:
            text, host, process, boot = raw.decode().split()
            count, pid = int(text), int(process)
        except ValueError:
            return None  # no rank writes such a thing
        if self._last is None or self._last[0] != count:
            self._last = (count, now)
        quiet = now - self._last[1]
        place = f"rank {rank} (process {pid} on {host})"
        if boot == self._boot != "unknown" and process_is_gone(pid):
            return f"{place} has died"
        return f"{place} has sent no heartbeat for {quiet:.0f} s" if quiet > silence else None

    @staticmethod
    def _key(rank: int) -> str:
        return f"kerple/heartbeat/{rank}"


def _print_death(rank: int, dead: str) -> None:
    print(
        f"error ({rank_place(rank)}): {dead}; ending this rank. "
        "Checkpoints are complete: start the job again to continue from the newest.",
        file=sys.stderr,
        flush=True,
    )


def start_heartbeat(timeout_minutes: float) -> Heartbeat | None:
    """A heartbeat for jobs of several processes."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    # A connection of its own: the default store is busy while a collective waits in it.
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=10),
    )
    heartbeat = Heartbeat(dist.get_rank(), dist.get_world_size(), timeout_minutes * 60, store)
    heartbeat.start()
    return heartbeat


@contextlib.contextmanager
def bounded_join(timeout_minutes: float) -> Iterator[None]:
    """End this process if the block, which joins the other ranks, takes more than two timeouts.

    One to find all ranks in the store, one to connect to each. By itself gloo waits longer for a
    peer that has given up.
    """

    def give_up() -> None:
        explain(None, dist.DistNetworkError("not connected after two timeouts"))
        os._exit(EXIT_PEER_LOST)

    timer = threading.Timer(2 * timeout_minutes * 60 + 5 * INTERVAL, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def watched_peers(timeout_minutes: float) -> Iterator[None]:
    """Inside the block a lost peer is named and ends this process with `EXIT_PEER_LOST`."""
    heartbeat, finished = start_heartbeat(timeout_minutes), False
    try:
        yield
        finished = True
    except RuntimeError as error:
        exit_or_raise(heartbeat, error)
    finally:
        if heartbeat is not None:
            heartbeat.stop(finished=finished)


def exit_or_raise(heartbeat: Heartbeat | None, error: BaseException) -> NoReturn:
    """End this process if a lost peer caused `error`: leaving the group would wait for the peer."""
    if not explain(heartbeat, error):
        raise error
    sys.stdout.flush()
    os._exit(heartbeat.code if heartbeat else EXIT_PEER_LOST)


def explain(heartbeat: Heartbeat | None, error: BaseException) -> bool:
    """Whether `error` came from a lost peer; if so, it has been named.

    Without a heartbeat the job had not connected yet: which rank is missing is not known.
    """
    if not _is_communication_error(error):
        return False
    if heartbeat is None and os.environ.get("WORLD_SIZE", "1") == "1":
        return False  # no peers
    if heartbeat is None:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        place = rank_place(os.environ.get("RANK", "0"))
        print(
            f"error ({place}): not all processes of the job connected"
            f" ({reason.rstrip('.')}). Read the other ranks' errors, and start the job again; "
            f"distributed_timeout_minutes is how long they wait for each other.{_interface()}",
            file=sys.stderr,
            flush=True,
        )
        return True
    dead = heartbeat.find_dead()
    if dead is not None:
        _print_death(heartbeat.rank, dead)
    return dead is not None


def _interface() -> str:
    """Which interface gloo took, in a job that other hosts take part in."""
    if not spans_hosts(os.environ):
        return ""
    used = os.environ.get(GLOO_INTERFACE)
    known = f"is {used}" if used else f"is not set: gloo uses the address of {socket.gethostname()}"
    reach = "the interface through which the hosts reach each other"
    return f" {GLOO_INTERFACE} {known}; it must name {reach}."


def _is_communication_error(error: BaseException | None) -> bool:
    kinds: tuple[Any, ...] = (dist.DistError,)
    words = (
        *("gloo", "nccl", "connection", "socket", "timed out", "timeout", "peer", "store"),
        "pair closure",  # gloo, in whatever waits when a pair of processes is given up
    )
    while error is not None:
        text = str(error).lower()
        if isinstance(error, kinds) or (
            isinstance(error, RuntimeError) and any(word in text for word in words)
        ):
            return True
        error = error.__cause__
    return False
