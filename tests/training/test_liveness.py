"""Who notices a dead rank, and what that costs the job's store. Real processes: test_signals.py."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from megatron.training import liveness
from megatron.training.liveness import DEAD, FINISHED_BEAT, Heartbeat, explain, process_is_gone


class CountingStore:
    """torch's key-value store in memory, counting what is asked of it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests = 0
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self.requests += 1
            self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        with self._lock:
            self.requests += 1
            return self.values[key]

    def check(self, keys: Sequence[str]) -> bool:
        with self._lock:
            self.requests += 1
            return all(key in self.values for key in keys)


def job(world_size: int) -> tuple[CountingStore, list[Heartbeat]]:
    store = CountingStore()
    ranks = [Heartbeat(rank, world_size, 60.0, store) for rank in range(world_size)]
    for heartbeat in ranks:
        heartbeat.turn(silence=60.0)
    return store, ranks


def test_a_thousand_ranks_ask_the_store_a_few_thousand_times_a_second() -> None:
    store, ranks = job(1024)
    store.requests = 0
    assert all(heartbeat.turn(silence=60.0) is None for heartbeat in ranks)
    assert store.requests == 4 * 1024  # a turn a second; every pair of ranks would be 1,047,552


def test_a_silent_rank_is_named_by_its_neighbour_and_known_to_all() -> None:
    _, ranks = job(8)
    for heartbeat in ranks:
        if heartbeat.rank != 5:
            heartbeat.turn(silence=60.0)
    found = ranks[4].turn(silence=-1.0)
    assert found is not None and "rank 5" in found and "no heartbeat" in found
    assert [ranks[i].turn(silence=60.0) for i in (0, 2, 7)] == [found] * 3


def test_a_finished_rank_alarms_nobody_and_the_one_behind_it_is_watched() -> None:
    store, ranks = job(4)
    store.set("kerple/heartbeat/2", FINISHED_BEAT)
    assert ranks[1].turn(silence=-1.0) is None  # farewell: not silence
    found = ranks[1].turn(silence=-1.0)
    assert found is not None and "rank 3" in found


def test_junk_in_the_store_is_ignored() -> None:
    store, ranks = job(3)
    for junk in ("", "x", "1 2 3", "1 2 3 4 5", "one host 7 boot", "1 host x boot"):
        store.set("kerple/heartbeat/1", junk)
        assert ranks[0].turn(silence=-1.0) is None
    store.values["kerple/heartbeat/1"] = b"\xff\xfe"
    assert ranks[0].turn(silence=-1.0) is None
    assert DEAD not in store.values


def test_a_job_that_never_came_together_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    late = dist.DistStoreError("Timed out after 61 seconds waiting for clients. 1/2 joined.\nmore")
    assert explain(None, late)
    line = capsys.readouterr().err
    assert line.startswith("error (rank 3): ")
    assert "1/2 joined)" in line and "distributed_timeout_minutes" in line
    assert line.count("\n") == 1
    assert not explain(None, RuntimeError("a mistake of ours"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not explain(None, late)


def test_gone_processes_are_told_from_living_ones() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert not process_is_gone(child.pid)
    child.kill()
    deadline = time.monotonic() + 10
    while not process_is_gone(child.pid):  # a zombie, not yet waited for, counts as gone
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.wait()
    assert process_is_gone(child.pid)


STOPPED_STORE = """
import time
from megatron.training.liveness import Heartbeat

class Stopped:
    requests = 0
    def answer(self, *_):
        self.requests += 1
        while self.requests > 6:
            time.sleep(60)  # as torch's client waits for a host that neither answers nor closes
        return False
    set = get = check = answer

heartbeat = Heartbeat(1, 2, 1.0, Stopped())
heartbeat.start()
print("found", heartbeat.find_dead(patience=60))  # a collective failed: this waits for the lock
"""


def test_a_rank_that_waits_for_the_stores_host_ends_within_the_timeout() -> None:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_STORE], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 77, done.stdout + done.stderr
    assert "rank 0, which keeps the job's store, has not answered for" in done.stderr
    assert "found" not in done.stdout and time.monotonic() - start < 50


def test_an_error_of_one_rank_is_the_code_of_all() -> None:
    """srun returns the highest code: 77 of the others would hide the 2 of the one that failed."""
    _, ranks = job(3)
    assert ranks[0].code == 77
    ranks[1].tell_code(2)
    found = ranks[0].turn(silence=60.0)
    assert found is not None and "rank 1 on" in found and "ended with code 2" in found
    assert ranks[0].code == 2


NEVER_JOINED = """
import os, time
from megatron.training import liveness
os.environ.update(RANK="1", WORLD_SIZE="2")
liveness.INTERVAL = 0.1
with liveness.bounded_join(0.01):
    time.sleep(60)  # as gloo connects to a peer that has given up
"""


def test_joining_ends_after_two_timeouts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NEVER_JOINED], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 77, done.stdout + done.stderr
    assert "error (rank 1): not all processes of the job connected" in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "Application timeout caused pair closure",
        "[gloo/transport/tcp/pair.cc] Connection closed by peer [10.0.0.1]:4242",
        "Timed out waiting 10000ms for recv operation to complete",
    ],
)
def test_what_gloo_says_of_a_lost_peer_is_known(text: str) -> None:
    assert liveness._is_communication_error(RuntimeError(text))
    assert not liveness._is_communication_error(RuntimeError("shape '[2]' is invalid"))
