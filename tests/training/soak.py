"""Kill training at random moments, over every layout, and compare the end to the bit.

python -m tests.training.soak 100 [--seed 0]

Each layout trains once undisturbed and once with its share of `kill -9`s, of all ranks or of one.
Losses, weights, optimizer, schedule and random states of the two last checkpoints must be equal.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoints.safe_files import load_file
from megatron.checkpoints.store import CheckpointStore
from tests.training.cases import layout, write_data
from tests.training.runs import final_valid_loss, finish, losses, run, run_config, start_run

BACKGROUND = {"async_save": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, layout()),
    "ZeRO 1": (1, layout(zero=1)),
    "ZeRO 2": (1, layout(zero=2)),
    "ZeRO 3": (1, layout(zero=3)),
    "dp 2": (2, layout()),
    "mp 2": (2, layout(mp=2)),
    "pp 2": (2, layout(pp=2)),
    "dp 2, ZeRO 1": (2, layout(zero=1)),
    "dp 2, ZeRO 3": (2, layout(zero=3)),
    "one, async": (1, {**layout(), **BACKGROUND}),
    "pp 2, async": (2, {**layout(pp=2), **BACKGROUND}),
    "dp 2, Z1, async": (2, {**layout(zero=1), **BACKGROUND}),
    "dp 2, Z3, async": (2, {**layout(zero=3), **BACKGROUND}),
}
STEPS_PER_KILL = 12


def soak(name: str, kills: int, generator: random.Random, root: Path, data: str) -> list[str]:
    """What differs between the killed run and the undisturbed one."""
    processes, place = LAYOUTS[name]
    steps = 20 + STEPS_PER_KILL * kills

    def config(save: Path) -> dict[str, Any]:
        return run_config(data, save, train_iters=steps, checkpoint_factor=1, **place)

    whole, broken = root / "whole", root / "broken"
    run(config(whole / "run"), whole, processes, timeout=900)
    for _ in range(kills):
        _kill_once(config(broken / "run"), broken, processes, generator)
    run(config(broken / "run"), broken, processes, timeout=900)
    return _differences(whole / "run", broken / "run", steps)


def _kill_once(
    config: dict[str, Any], directory: Path, processes: int, generator: random.Random
) -> None:
    save = Path(config["save"])
    before = len(_steps(save))
    job = start_run(config, directory, processes)
    deadline = time.monotonic() + 300
    while len(_steps(save)) <= before and all(rank.poll() is None for rank in job):
        assert time.monotonic() < deadline, "no step in five minutes"
        time.sleep(0.01)
    time.sleep(generator.uniform(0.0, 0.4))
    victims = job if generator.random() < 0.5 else [generator.choice(job)]
    for rank in victims:
        rank.send_signal(signal.SIGKILL)
    finish(job, timeout=120)
    newest = CheckpointStore(save).newest()
    if newest is not None:
        CheckpointStore(save).verify(newest)


def _steps(save: Path) -> dict[int, float]:
    return losses(save) if (save / "metrics.jsonl").exists() else {}


def _differences(whole: Path, broken: Path, steps: int) -> list[str]:
    found = []
    if losses(whole) != losses(broken):
        found.append("losses")
    if final_valid_loss(whole) != final_valid_loss(broken):
        found.append("validation loss")
    ours, theirs = (CheckpointStore(place).path(steps) for place in (whole, broken))
    for path in sorted(ours.glob("*.pt")):
        if not same(load_file(path), load_file(theirs / path.name)):
            found.append(path.name)
    return found


def same(a: Any, b: Any) -> bool:
    """Whether two loaded files hold the same bits."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if hasattr(a, "__dict__") and not callable(a):
        return same(vars(a), vars(b))
    return bool(a == b)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kills", type=int, nargs="?", default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shares = [
        options.kills // len(LAYOUTS) + (n < options.kills % len(LAYOUTS))
        for n in range(len(LAYOUTS))
    ]
    bad = False
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        data = write_data(Path(scratch))
        for name, kills in zip(LAYOUTS, shares, strict=True):
            if not kills:
                continue
            start = time.monotonic()
            root = Path(scratch) / name.replace(" ", "_").replace(",", "")
            generator = random.Random(f"{options.seed}:{name}")
            found = soak(name, kills, generator, root, data)
            bad = bad or bool(found)
            verdict = f"DIFFERS in {', '.join(found)}" if found else "equal to the bit"
            seconds = time.monotonic() - start
            print(f"{name:<16}{kills:>4} kills: {verdict} ({seconds:.0f} s)", flush=True)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
