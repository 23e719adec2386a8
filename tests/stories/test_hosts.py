"""One job over several hosts: srun on two nodes, a lost link, a stopped rank, a killed node.

The hosts are namespaces of this machine (tests/stories/hosts.py) with a real Slurm over them.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.forked_ranks import ForkedRank
from tests.stories.hosts import CONTROLLER, TRAIN, Hosts, unusable
from tests.stories.test_real_slurm import throwaway
from tests.training.cases import layout, write_data
from tests.training.runs import losses, run_config
from tests.training.soak import differences

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(180)]

TIMEOUT_SECONDS = 12
TWO_NODES = ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    reason = unusable()
    if reason is not None:
        pytest.skip(f"several hosts on one machine: {reason}")
    found = Hosts(tmp_path_factory.mktemp("hosts"), throwaway())
    try:
        found.start()
        yield found
    finally:
        found.stop()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_data(tmp_path_factory.mktemp("data"))


def written(data: str, tmp_path: Path, **changes: Any) -> str:
    """The config's file; without dropout, whose streams depend on the layout."""
    keys = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "train_iters": 8}
    config = {**run_config(data, tmp_path / "run", **keys), **changes}
    config.setdefault("distributed_timeout_minutes", 0.5)
    file = tmp_path / "config.yml"
    file.write_text(yaml.safe_dump(config))
    return str(file)


def test_two_nodes_train_what_one_process_does(hosts: Hosts, data: str, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (alone,) = hosts.start_ranks(["n3"], "train.py", written(data, tmp_path / "one"))
    done = hosts.run(CONTROLLER, *TWO_NODES, *TRAIN, written(data, tmp_path))
    assert done.returncode == 0, done.stdout
    assert alone.wait(timeout=60) == 0, alone.communicate()[0]
    expected, found = losses(tmp_path / "one" / "run"), losses(tmp_path / "run")
    assert list(found) == list(range(1, 9))
    assert all(math.isclose(found[step], expected[step], rel_tol=1e-5) for step in expected)


def test_a_directory_of_each_host_is_refused(hosts: Hosts, data: str, tmp_path: Path) -> None:
    file = written(data, tmp_path, save=str(hosts.private / "run"))
    done = hosts.run(CONTROLLER, *TWO_NODES, *TRAIN, file)
    assert done.returncode == 2, done.stdout
    assert "Every host must share that directory" in done.stdout
    assert re.search(r"not seen by rank 1 on n[123]", done.stdout)


def test_deepy_in_an_allocation_and_names_that_mean_loopback(
    hosts: Hosts, data: str, tmp_path: Path
) -> None:
    """`launcher: slurm`. Debian's 127.0.1.1: gloo would listen where no other host can connect."""
    deepy = ["salloc", "--nodes=2", "--ntasks-per-node=1", sys.executable, "deepy.py", "train.py"]
    try:
        for name in ("n1", "n2", "n3"):
            hosts.names_file(name, own="127.0.1.1")
        done = hosts.run(CONTROLLER, *deepy, written(data, tmp_path, launcher="slurm"))
    finally:
        for name in ("n1", "n2", "n3"):
            hosts.names_file(name)
    assert done.returncode == 0, done.stdout
    assert list(losses(tmp_path / "run")) == list(range(1, 9))


ASYNCHRONOUS = {"async_save": True}
FAULTS = {
    "link of n3 down, mp 2": (None, layout(mp=2)),
    "rank 0 stopped, pp 2, async_save": ((0, signal.SIGSTOP), layout(pp=2) | ASYNCHRONOUS),
    "rank 1 killed, ZeRO 1, async_save": ((1, signal.SIGKILL), layout(zero=1) | ASYNCHRONOUS),
    "rank 1 stopped, ZeRO 2": ((1, signal.SIGSTOP), layout(zero=2)),
    "rank 0 killed, ZeRO 3": ((0, signal.SIGKILL), layout(zero=3)),
}


Struck = Future[tuple[Path, Path, int]]


class Faults:
    """All faults at once, because each job waits for most of its time."""

    def __init__(self, hosts: Hosts, data: str, place: Path) -> None:
        self.hosts, self.data, self.place = hosts, data, place

    def strike(self, fault: str) -> tuple[Path, Path, int]:
        """One job is struck, ends and is resumed: an undisturbed run, this one, and their steps."""
        struck, place = FAULTS[fault]
        names = ["n1", "n3" if struck is None else "n2"]
        endless = {**place, "train_iters": 100_000, "checkpoint_factor": 5}
        broken, whole = (self.place / fault / name for name in ("broken", "whole"))
        for folder in (broken, whole):
            folder.mkdir(parents=True)
        minutes = {"distributed_timeout_minutes": TIMEOUT_SECONDS / 60}
        file = written(self.data, broken, **endless, **minutes)
        self._lose(self.hosts.start_ranks(names, "train.py", file), struck, broken / "run")
        steps = max(losses(broken / "run")) + 2
        files = [written(self.data, x, exit_interval=steps, **endless) for x in (broken, whole)]
        jobs = [self.hosts.start_ranks(names, "train.py", file) for file in files]
        for rank in [rank for job in jobs for rank in job]:
            output = rank.communicate(timeout=90)[0]
            assert rank.returncode == 0, output
        return whole / "run", broken / "run", steps

    def _lose(self, ranks: list[ForkedRank], struck: tuple[int, int] | None, run: Path) -> None:
        """The ranks that are left end with 77, in time, and name the lost one."""
        left = [rank for number, rank in enumerate(ranks) if struck is None or number != struck[0]]
        try:
            wait_for_step(run, ranks)
            start = time.monotonic()
            if struck is None:
                self.hosts.link("n3", "down")
            else:
                os.kill(ranks[struck[0]].pid, struck[1])
            outputs = [rank.communicate(timeout=60)[0] for rank in left]
            seconds = time.monotonic() - start
        finally:
            if struck is None:
                self.hosts.link("n3", "up")
            for rank in ranks:
                rank.kill()
                rank.wait(timeout=20)
        assert [rank.returncode for rank in left] == [77] * len(left), outputs
        assert all(re.search(r"error \(rank \d on n[123]\): .*rank \d", text) for text in outputs)
        assert seconds < TIMEOUT_SECONDS + 20


@pytest.fixture(scope="module")
def struck(
    hosts: Hosts, data: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Struck]]:
    faults = Faults(hosts, data, tmp_path_factory.mktemp("faults"))
    with ThreadPoolExecutor(len(FAULTS)) as pool:
        yield {fault: pool.submit(faults.strike, fault) for fault in FAULTS}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lost_host_ends_the_others_and_the_run_goes_on_to_the_same_bits(
    struck: dict[str, Struck], fault: str
) -> None:
    wait(struck.values())  # no later test shares the cores with them
    whole, broken, steps = struck[fault].result()
    assert differences(whole, broken, steps) == []  # not in a thread: torch's allow-list is global


@pytest.fixture(scope="module")
def ssh(hosts: Hosts) -> Hosts:
    if not Path("/usr/sbin/sshd").exists():
        pytest.skip("not installed: openssh-server")
    hosts.start_sshd()
    return hosts


@pytest.mark.skipif(shutil.which("pdsh") is None, reason="not installed: pdsh")
def test_pdsh_passes_a_signal_on_and_prints_no_config(
    ssh: Hosts, data: str, tmp_path: Path
) -> None:
    (tmp_path / "hostfile").write_text("n1 slots=1\nn2 slots=1\n")
    endless = {"train_iters": 100_000, "checkpoint_factor": 100_000, "no_ssh_check": True}
    keys = {"hostfile": str(tmp_path / "hostfile"), "master_addr": "n1", **endless}
    command = [sys.executable, "deepy.py", "train.py", written(data, tmp_path, **keys)]
    job = subprocess.Popen(
        [*ssh.hosts[CONTROLLER].enter, *command],
        env=ssh.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and len(losses(tmp_path / "run")) > 5, metrics, 60)
        os.kill(child_of(job), signal.SIGINT)
        output = job.communicate(timeout=40)[0]
    finally:
        job.kill()
    assert job.returncode == 130, output
    assert max(map(len, output.splitlines())) < 500, output
    assert (
        tmp_path / "run" / "latest"
    ).read_text() == f"global_step{max(losses(tmp_path / 'run'))}"


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="not installed: mpirun")
def test_mpirun_needs_the_address_of_rank_0(ssh: Hosts, data: str, tmp_path: Path) -> None:
    mpirun = ["mpirun", "--allow-run-as-root", "-np", "2", "--host", "n1,n2"]
    mpirun += ["-x", "PYTHONPATH", "-x", "DS_ACCELERATOR", "-x", "OMP_NUM_THREADS", *TRAIN]
    file = written(data, tmp_path)
    without = ssh.run(CONTROLLER, *mpirun, file)
    assert without.returncode == 2 and "master_addr is not set" in without.stdout, without.stdout
    done = ssh.run(CONTROLLER, *mpirun, file, "--set", "master_addr=n1")
    assert done.returncode == 0, done.stdout
    assert list(losses(tmp_path / "run")) == list(range(1, 9))


def test_a_killed_node_requeues_the_job(hosts: Hosts, data: str, tmp_path: Path) -> None:
    """Last of all: the node does not come back."""
    file = written(data, tmp_path, train_iters=400, checkpoint_factor=50)
    script = tmp_path / "job.sh"
    command = " ".join(["srun", "--kill-on-bad-exit=0", "--wait=60", *TRAIN, file])
    script.write_text(f"#!/bin/bash\n{command}\n")
    options = ["--nodes=2", "--ntasks-per-node=1", "--requeue", "--open-mode=append"]
    log = tmp_path / "job.log"
    start = ["sbatch", "--parsable", *options, f"--output={log}", str(script)]
    job = hosts.run(CONTROLLER, *start).stdout.strip()
    assert job.isdigit(), job
    run = tmp_path / "run"
    wait_until(lambda: (run / "latest").exists(), log, 60)
    nodes = hosts.run(CONTROLLER, "squeue", "--noheader", "--jobs", job, "--format=%N").stdout
    first, second = ("n" + number for number in re.findall(r"\d+", nodes)[:2])
    assert first < second
    hosts.kill(second)
    wait_until(lambda: finished(run, 400), log, 120)
    shown = hosts.run(CONTROLLER, "scontrol", "show", "job", job).stdout
    assert "Restarts=1" in shown, shown
    assert list(losses(run)) == list(range(1, 401))


def wait_for_step(run: Path, ranks: list[ForkedRank]) -> None:
    deadline = time.monotonic() + 60
    while not (run / "latest").exists():
        for rank in ranks:
            assert rank.poll() is None, rank.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def wait_until(condition: Any, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
        time.sleep(0.3)


def finished(run: Path, steps: int) -> bool:
    latest = run / "latest"
    return latest.exists() and latest.read_text().strip() == f"global_step{steps}"


def child_of(rank: subprocess.Popen[str]) -> int:
    """The rank itself: nsenter starts it as a child, to be in the host's process table."""
    return int(Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split()[0])
