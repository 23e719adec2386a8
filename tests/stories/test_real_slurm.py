"""The smoke suite through a real Slurm: submitted, preempted twice, requeued, evaluated, reported.

Starts its own one-node Slurm on loopback (tools/slurm/throwaway.py); needs root, slurm-wlm, munge.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from megatron.paper.run_files import read_metrics
from tests.conftest import REPOSITORY

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons need root"),
]

STEPS = 1000
RUNS = ("smoke.stdlib.kerple_log.1235", "smoke_two.stdlib.kerple_log.1235")


def throwaway() -> ModuleType:
    path = REPOSITORY / "tools" / "slurm" / "throwaway.py"
    spec = importlib.util.spec_from_file_location("throwaway", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment variables of a running Slurm."""
    tool = throwaway()
    directory = tmp_path_factory.mktemp("slurm")
    try:
        tool.start(directory, cpus=32)
        yield {**os.environ, **tool.environment(directory), "OMP_NUM_THREADS": "1"}
    finally:
        tool.stop(directory)


class Cluster:
    """tools/reproduce.py and Slurm's commands on one suite."""

    def __init__(self, environment: dict[str, str], root: Path) -> None:
        self.environment, self.root = environment, root

    def call(self, *command: str) -> str:
        result = subprocess.run(
            command,
            env=self.environment,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
        return result.stdout

    def reproduce(self, command: str, *arguments: str, runs: tuple[str, ...] = RUNS) -> str:
        places = ["--runs", str(self.root / "runs"), "--data", str(self.root / "data")]
        sets = ["--set", f"train_iters={STEPS}", f"lr_decay_iters={STEPS}", "log_interval=10"]
        common = ["--suite", "smoke", *places, *sets, "--only", *runs]
        return self.call(sys.executable, "tools/reproduce.py", command, *common, *arguments)

    def steps(self, run: str) -> list[int]:
        path = self.root / "runs" / "smoke" / run / "metrics.jsonl"
        return [entry["step"] for entry in read_metrics(path) if "loss" in entry]

    def logs(self) -> str:
        folder = self.root / "runs" / "smoke"
        paths = [*folder.glob("slurm/logs/*.log"), *folder.glob("*/logs/*.log")]
        return "\n".join(f"== {path}\n{path.read_text()[-1500:]}" for path in paths)

    def wait(self, what: str, condition: Callable[[], bool], seconds: float = 500) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited too long for {what}\n{self.logs()}"
            time.sleep(1)


SMALL = ["--no-gpus", "--cpus-per-task=1", "--data-cpus=1", "--grace=30"]
SMALL += ["--time=10:00", "--evaluate-time=10:00", "--data-time=10:00"]


def job_numbers(output: str) -> dict[str, str]:
    return dict(re.findall(r"^(\S+): job (\d+),", output, re.MULTILINE))


def test_suite_survives_preemption(slurm: dict[str, str], tmp_path: Path) -> None:
    cluster = Cluster(slurm, tmp_path)
    jobs = job_numbers(cluster.reproduce("submit", *SMALL))
    stages = ["data", "train-smoke", "evaluate-smoke", "train-smoke_two", "evaluate-smoke_two"]
    assert list(jobs) == [*stages, "report"]

    for run in RUNS:
        cluster.wait(f"training of {run}", lambda run=run: max(cluster.steps(run), default=0) > 50)
    status = cluster.reproduce("status")
    assert re.search(r"smoke\.stdlib\S+ +running +train .* train-smoke RUNNING", status)

    # The first as Slurm preempts (TERM to everything), the second as it warns of the time limit.
    cluster.call("scontrol", "requeue", f"{jobs['train-smoke']}_0")
    cluster.call("scancel", "--batch", "--signal=USR1", f"{jobs['train-smoke_two']}_0")
    cluster.wait("all jobs", lambda: not cluster.call("squeue", "--noheader").strip())

    for name in ("train-smoke", "train-smoke_two"):
        details = cluster.call("scontrol", "show", "job", f"{jobs[name]}_0")
        assert "Restarts=1" in details
        assert "JobState=COMPLETED" in details
    for run in RUNS:
        log = (tmp_path / "runs" / "smoke" / run / "logs" / "train.log").read_text()
        saved = re.search(r"stopped after step (\d+): received SIG", log)
        assert saved, log
        assert f"resuming after step {saved.group(1)}" in log
        steps = cluster.steps(run)
        assert steps[-1] == STEPS
        assert len(steps) == len(set(steps)), "a step was logged twice"
        assert set(range(10, STEPS + 1, 10)) <= set(steps), "steps were lost"
    assert "2 runs: 2 done" in cluster.reproduce("status")

    one, two = (final_perplexity(tmp_path / "runs" / "smoke" / run) for run in RUNS)
    assert one == pytest.approx(two, rel=1e-2), "two srun tasks must train the same model as one"
    page = (tmp_path / "runs" / "smoke" / "report" / "report.html").read_text(encoding="utf-8")
    assert "2 of 2 finished" in page


def final_perplexity(directory: Path) -> float:
    path = next((directory / "results").glob("step*_extrapolation.json"))
    return float(json.loads(path.read_text())["results"]["valid"][0]["ppl"])


def test_a_failed_run_does_not_block_the_report(slurm: dict[str, str], tmp_path: Path) -> None:
    cluster = Cluster(slurm, tmp_path)
    one = (RUNS[0],)
    # There is no GPU here: training fails at its start.
    extra = ["--set", "attention_engine=triton"]
    cluster.reproduce("submit", *SMALL, *extra, runs=one)
    cluster.wait("all jobs", lambda: not cluster.call("squeue", "--noheader").strip())
    status = cluster.reproduce("status", *extra, runs=one)
    assert re.search(r"smoke\.stdlib\S+ +failed +train", status)
    page = (tmp_path / "runs" / "smoke" / "report" / "report.html").read_text(encoding="utf-8")
    assert "0 of 1 finished" in page
    assert "Missing runs (1)" in page
