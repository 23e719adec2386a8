"""Kill training at random moments, over every layout, and compare the end to the bit.

python -m tests.training.soak 100 [--seed 0] [--only LAYOUT]

Each layout trains once with its share of `kill -9`s, of all ranks or of one, and once undisturbed
to the same step. Every number of metrics.jsonl that is no time, and all tensors, counters and
random states of the last checkpoint must be equal. A checkpoint is written after every step, so
that many kills strike while one is being written; one in five strikes before the first step.

The ranks are forked from this process, which has imported everything: a start costs a second
instead of ten. test_kill.py and test_signals.py start `python train.py` itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron.checkpoints.safe_files import load_file
from megatron.checkpoints.store import CheckpointStore
from megatron.commands import run
from megatron.errors import CheckpointError
from megatron.launcher.environment import free_port
from megatron.training.liveness import EXIT_PEER_LOST
from tests.processes import rank_environment
from tests.training.cases import layout, write_data
from tests.training.runs import losses, run_config

ASYNCHRONOUS = {"async_save": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, layout()),
    "one process, asynchronous": (1, {**layout(), **ASYNCHRONOUS}),
    "ZeRO 1": (1, layout(zero=1)),
    "ZeRO 2": (1, layout(zero=2)),
    "ZeRO 3": (1, layout(zero=3)),
    "dp 2": (2, layout()),
    "mp 2": (2, layout(mp=2)),
    "pp 2": (2, layout(pp=2)),
    "pp 2, asynchronous": (2, {**layout(pp=2), **ASYNCHRONOUS}),
    "dp 2, ZeRO 1, asynchronous": (2, {**layout(zero=1), **ASYNCHRONOUS}),
    "dp 2, ZeRO 3": (2, layout(zero=3)),
    "dp 2, ZeRO 3, asynchronous": (2, {**layout(zero=3), **ASYNCHRONOUS}),
}
TIMES = {"time", "tokens_per_second", "model_tflops", "step_seconds", "memory_gb", "mfu"}
"""What differs between two runs of the same numbers."""
LONGEST = 2000
SECONDS = 300.0


@dataclass
class Rank:
    """A forked process that runs train.py's main function."""

    pid: int
    output: Path
    code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait(self) -> int:
        deadline = time.monotonic() + SECONDS
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                raise TimeoutError(f"a rank did not end:\n{self.output.read_text()[-3000:]}")
            time.sleep(0.01)
        return code


@dataclass
class Outcome:
    """What came of one layout."""

    kills: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    differences: list[str] = field(default_factory=list)


def start(config: dict[str, Any], directory: Path, processes: int) -> list[Rank]:
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "config.yml"
    file.write_text(yaml.safe_dump(config))
    port = free_port()
    ranks = []
    for rank in range(processes):
        output = directory / f"rank{rank}.txt"
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, processes, port, file, output)
        ranks.append(Rank(pid, output))
    return ranks


def _be_rank(rank: int, processes: int, port: int, config: Path, output: Path) -> None:
    """What a forked process does; it never returns."""
    code = 1
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ.update(rank_environment(rank, processes, port))
        code = run("train", [str(config)])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def soak(name: str, kills: int, generator: random.Random, root: Path, data: str) -> Outcome:
    """Kill, resume, and compare with the undisturbed run."""
    processes, place = LAYOUTS[name]

    def config(save: Path, **changes: Any) -> dict[str, Any]:
        settings = {**place, "train_iters": LONGEST, "checkpoint_factor": 1, **changes}
        settings["distributed_timeout_minutes"] = 1  # for a rank whose peer died before it came
        return run_config(data, save, **settings)

    whole, broken = root / "whole", root / "broken"
    outcome = Outcome()
    while outcome.kills.total() < kills:
        outcome.kills[_kill_once(config(broken / "run"), broken, processes, generator)] += 1
    outcome.steps = max(_steps(broken / "run"), default=0) + 2
    for place_ in (broken, whole):
        job = start(config(place_ / "run", exit_interval=outcome.steps), place_, processes)
        for rank in job:
            if (code := rank.wait()) != 0:
                raise AssertionError(f"{name}: ended with {code}:\n{rank.output.read_text()}")
    outcome.differences = differences(whole / "run", broken / "run", outcome.steps)
    return outcome


def _kill_once(
    config: dict[str, Any], directory: Path, processes: int, generator: random.Random
) -> str:
    """One kill; where it struck."""
    save = Path(config["save"])
    before = len(_steps(save))
    job = start(config, directory, processes)
    early = generator.random() < 0.2
    deadline = time.monotonic() + SECONDS
    while not early and len(_steps(save)) <= before:
        if any(rank.poll() is not None for rank in job) or time.monotonic() > deadline:
            text = "\n".join(rank.output.read_text()[-3000:] for rank in job)
            for rank in job:
                _kill(rank)
            raise AssertionError(f"the resumed run made no step:\n{text}")
        time.sleep(0.005)
    time.sleep(generator.uniform(0.0, 1.0 if early else 0.3))
    victims = job if generator.random() < 0.5 else [generator.choice(job)]
    saving = (save / ".incomplete").is_dir() and any((save / ".incomplete").iterdir())
    for rank in victims:
        _kill(rank)
    for rank in job:
        code = rank.wait()
        if rank not in victims and code != EXIT_PEER_LOST:
            raise AssertionError(f"the other rank ended with {code}:\n{rank.output.read_text()}")
    store = CheckpointStore(save)
    newest = store.newest() if save.is_dir() else None
    if newest is not None:
        store.verify(newest)
    return "starting" if early else "saving" if saving else "between saves"


def _kill(rank: Rank) -> None:
    if rank.poll() is None:
        os.kill(rank.pid, signal.SIGKILL)


def _steps(save: Path) -> dict[int, float]:
    return losses(save) if (save / "metrics.jsonl").exists() else {}


def differences(whole: Path, broken: Path, steps: int) -> list[str]:
    """What is not equal, to the bit; a run that did not reach `steps` differs."""
    found = []
    if _numbers(whole) != _numbers(broken) or max(_steps(whole)) != steps:
        found.append("metrics")
    ours, theirs = (CheckpointStore(place).path(steps) for place in (whole, broken))
    files = sorted(path.name for path in ours.glob("*.pt"))
    if not files or files != sorted(path.name for path in theirs.glob("*.pt")):
        found.append("files")
    for name in files:
        if not same(load_file(ours / name), load_file(theirs / name)):
            found.append(name)
    return found


def _numbers(save: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in line if key not in TIMES} for line in lines]


def same(a: Any, b: Any) -> bool:
    """Whether two loaded files hold the same bits."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if hasattr(a, "__dict__") and not callable(a):
        return type(a) is type(b) and same(vars(a), vars(b))
    return bool((a == b).all()) if hasattr(a == b, "all") else bool(a == b)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kills", type=int, nargs="?", default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=list(LAYOUTS))
    options = parser.parse_args()
    from megatron.machine import set_deepspeed_accelerator

    set_deepspeed_accelerator()
    torch.set_num_threads(1)  # a process with threads cannot be forked safely
    import megatron.training.entry  # noqa: F401 - what takes seconds, once for all ranks

    names = options.only or list(LAYOUTS)
    shares = [
        options.kills // len(names) + (n < options.kills % len(names)) for n in range(len(names))
    ]
    bad, all_kills = False, Counter[str]()
    print(f"{'':<28}{'kills':>6}{'starting':>10}{'saving':>8}{'between':>9}{'steps':>7}")
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        data = write_data(Path(scratch))
        for number, (name, kills) in enumerate(zip(names, shares, strict=True)):
            begun = time.monotonic()
            generator = random.Random(f"{options.seed}:{name}")
            try:
                outcome = soak(name, kills, generator, Path(scratch, str(number)), data)
            except (AssertionError, TimeoutError, CheckpointError) as error:
                outcome = Outcome(differences=[str(error)])
            found = outcome.differences
            bad, all_kills = bad or bool(found), all_kills + outcome.kills
            verdict = f"DIFFERS in {', '.join(found)}" if found else "equal to the bit"
            struck = outcome.kills
            print(
                f"{name:<28}{struck.total():>6}{struck['starting']:>10}{struck['saving']:>8}"
                f"{struck['between saves']:>9}{outcome.steps:>7}  {verdict} "
                f"({time.monotonic() - begun:.0f} s)",
                flush=True,
            )
    print(f"{all_kills.total()} kills: {dict(all_kills)}")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
