"""Runs of train.py that end by an error: none may end with another code than its own.

python -m tests.training.erroring 200 [--fresh 10] [--jobs 2]

Every kind of end that a run has while process groups exist, in turn, with one and two ranks, with
DeepSpeed and with torch alone. The ranks are forked with their imports (tests/forked_ranks.py); the
first --fresh runs start `python train.py` itself.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron.launcher.environment import free_port
from tests.forked_ranks import ForkedRank
from tests.processes import REPOSITORY, rank_environment
from tests.training.cases import ADAM, layout, write_data
from tests.training.runs import run, run_config

Job = list[subprocess.Popen[str]]
SECONDS = 900.0
ENDLESS = {"train_iters": 100_000, "checkpoint_factor": 100_000}
_starting = threading.Lock()


@dataclass(frozen=True)
class Kind:
    """One way to end: what differs from a good run, what is done to it, the codes of its ranks."""

    codes: tuple[int, ...]
    changes: dict[str, Any] = field(default_factory=dict)
    act: Callable[[Job, Path], None] | None = None
    """Called after the first step, with the run's directory."""
    spoil: Callable[[Path], None] | None = None
    """Called before, with a finished run's directory that this one continues."""


def _signal(rank: int, number: int) -> Callable[[Job, Path], None]:
    return lambda job, save: os.kill(job[rank].pid, number)


def _damage(save: Path) -> None:
    (file,) = save.glob("global_step*/mp_rank_00_model_states.pt")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _keep(save: Path) -> None:
    return


class FailingSGD(torch.optim.SGD):
    """SGD whose third step is a defect on one rank, while the others go on to their next wait."""

    def __init__(self, params: Any, lr: float, fails_on: int) -> None:
        super().__init__(params, lr)
        self._fails = int(os.environ.get("RANK", "0")) == fails_on
        self._steps = 0

    def step(self, closure: Any = None) -> Any:
        self._steps += 1
        if self._fails and self._steps == 3:
            raise RuntimeError("this optimizer fails at its third step")
        return super().step(closure)


def _failing(rank: int) -> dict[str, Any]:
    name = "tests.training.erroring:FailingSGD"
    optimizer = {"type": name, "params": {"lr": 0.1, "fails_on": rank}}
    return {"optimizer": optimizer, "train_iters": 50}


TORCH = {"training_backend": "torch"}
INFINITE = {"optimizer": {"type": "Adam", "params": {"lr": 1e30}}, "max_consecutive_nonfinite": 2}
KINDS: dict[str, Kind] = {
    "numbers that are not finite": Kind((76,), {**INFINITE, "train_iters": 50}),
    "a damaged checkpoint": Kind((2,), spoil=_damage),
    "another layout": Kind((2,), layout(zero=1), spoil=_keep),
    "SIGTERM": Kind((75,), ENDLESS, _signal(0, signal.SIGTERM)),
    "Ctrl-C": Kind((130,), {**ENDLESS, **layout(zero=2)}, _signal(0, signal.SIGINT)),
    "no data": Kind((2,), {"data_path": "nowhere"}),
    "two ranks, one killed": Kind((77, -9), ENDLESS, _signal(1, signal.SIGKILL)),
    "two ranks, one killed, pipeline": Kind(
        (-9, 77), {**ENDLESS, **layout(pp=2)}, _signal(0, signal.SIGKILL)
    ),
    "two ranks, a damaged checkpoint": Kind((2, 2), spoil=_damage),
    "two ranks, not finite": Kind((76, 76), {**INFINITE, "train_iters": 50}),
    "two ranks, SIGTERM": Kind((75, 75), ENDLESS, _signal(1, signal.SIGTERM)),
    "two ranks, a defect in a step": Kind((77, 1), _failing(1)),
    "two ranks, a defect on rank 0": Kind((1, 77), _failing(0)),
    "a key that does not exist": Kind((2,), {"num_layer": 2}),
    "torch, a defect in a step": Kind((1,), {**TORCH, **_failing(0)}),
    "torch, not finite": Kind((76,), {**TORCH, **INFINITE, "train_iters": 50}),
    "torch, a damaged checkpoint": Kind((2,), TORCH, spoil=_damage),
    "torch, SIGTERM": Kind((75,), {**TORCH, **ENDLESS}, _signal(0, signal.SIGTERM)),
    "torch, Ctrl-C": Kind((130,), {**TORCH, **ENDLESS}, _signal(0, signal.SIGINT)),
    "torch, no data": Kind((2,), {**TORCH, "data_path": "nowhere"}),
}


def one_run(name: str, kind: Kind, folder: Path, data: str, finished: Path, fresh: bool) -> str:
    """What went wrong; empty if every rank ended with its code."""
    save = folder / "run"
    changes = {"eval_interval": 1000, "distributed_timeout_minutes": 5, **kind.changes}
    config = run_config(data, save, **{"train_iters": 4, "optimizer": ADAM, **changes})
    if kind.spoil is not None:
        shutil.copytree(finished, save)
        kind.spoil(save)
    folder.mkdir(exist_ok=True)
    file = folder / "config.yml"
    file.write_text(yaml.safe_dump(config))
    job = _start(str(file), len(kind.codes), fresh)
    try:
        if kind.act is not None:
            _wait_for_a_step(save, job)
            kind.act(job, save)
        outputs = [rank.communicate(timeout=SECONDS)[0] for rank in job]
    finally:
        for rank in job:
            rank.kill()
    codes = tuple(rank.returncode for rank in job)
    shutil.rmtree(folder)
    return "" if codes == kind.codes else f"{name}: {codes}\n" + "\n".join(outputs)


def _start(file: str, ranks: int, fresh: bool) -> Job:
    with _starting:  # one connection to the server
        port = free_port()
        places = [rank_environment(rank, ranks, port) for rank in range(ranks)]
        if not fresh:
            return [ForkedRank(["train.py", file], place) for place in places]
        return [
            subprocess.Popen(
                [sys.executable, "train.py", file],
                cwd=REPOSITORY,
                env=place,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for place in places
        ]


def _wait_for_a_step(save: Path, job: Job) -> None:
    deadline = time.monotonic() + SECONDS
    metrics = save / "metrics.jsonl"
    while not (metrics.exists() and b'"loss"' in metrics.read_bytes()):
        if any(rank.poll() is not None for rank in job) or time.monotonic() > deadline:
            return
        time.sleep(0.02)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=int, nargs="?", default=200)
    parser.add_argument("--fresh", type=int, default=10, help="runs that start Python itself")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    ranks, wrong = 0, []
    with tempfile.TemporaryDirectory(prefix="erroring-") as scratch:
        root = Path(scratch)
        data = write_data(root)
        run(run_config(data, root / "good" / "run", train_iters=2), root / "good", timeout=SECONDS)
        finished = root / "good" / "run"

        def number(case: int) -> tuple[str, str]:
            name = list(KINDS)[case % len(KINDS)]
            fresh = case < options.fresh
            return name, one_run(name, KINDS[name], root / str(case), data, finished, fresh)

        with ThreadPoolExecutor(options.jobs) as pool:
            for name, problem in pool.map(number, range(options.runs)):
                counts[name] += 1
                ranks += len(KINDS[name].codes)
                wrong += [problem] if problem else []
                print(f"{counts.total()} {name} {problem}", file=sys.stderr, flush=True)
    load = os.getloadavg()[2]
    for name, kind in KINDS.items():
        print(f"{name:<36}{counts[name]:>5}  {kind.codes}")
    print(f"{counts.total()} runs, {ranks} ranks, load {load:.0f}: {len(wrong)} with another code")
    print("\n".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
