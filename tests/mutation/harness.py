"""Whether the tests see small faults: `python -m tests.mutation.harness N [--seed 0]`.

A fixed sample of N mutants of the modules below. Each is written into a copy of the checkout, where
the module's own test file runs (tests/test_house.py says which), then those of ALSO. A mutant is
killed by a failing test or by a run that takes too long; survivors are listed. Exit code 1 if less
than 90% were killed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.mutation.mutants import Mutant, mutants_of
from tests.test_house import TESTED_BY

PLACES = ("checkpoints", "data", "engines")
FILES = ("atomic_files.py", "training/optimizer.py", "backends/optimizers.py")
DISK = "tests/stories/test_power_cut.py"
ALSO = {
    "atomic_files.py": DISK,
    "checkpoints/store.py": DISK,
    "checkpoints/saving.py": DISK,
    "checkpoints/safe_files.py": "tests/checkpoints/test_pickle_check.py",
    "data/writer.py": DISK,
}
"""Tests of several modules, for mutants that survive their module's own."""
ENOUGH = 0.9


def modules() -> list[str]:
    root = REPOSITORY / "megatron"
    found = [path for place in PLACES for path in (root / place).rglob("*.py")]
    names = [path.relative_to(root).as_posix() for path in found if path.name != "__init__.py"]
    return sorted([*names, *FILES])


def sample(count: int, seed: int, only: str = "") -> list[tuple[str, Mutant]]:
    """The same for the same code, whatever N: the first ones of a fixed order."""
    everything = [
        (name, mutant)
        for name in modules()
        if re.search(only, name)
        for mutant in mutants_of((REPOSITORY / "megatron" / name).read_text(encoding="utf-8"))
    ]
    random.Random(seed).shuffle(everything)
    return everything[:count]


def own_tests(name: str) -> str:
    own = Path(name).with_name(f"test_{Path(name).name}").as_posix()
    return f"tests/{TESTED_BY.get(name, own)}"


class Checkout:
    """A copy to break, and what its tests say."""

    def __init__(self, folder: Path, longest: float) -> None:
        self.folder, self.longest = folder, longest
        self._baseline: dict[str, float | None] = {}
        skipped = shutil.ignore_patterns(".git", ".venv", "*.egg-info", "dist", "build", "runs")
        shutil.copytree(REPOSITORY, folder, ignore=skipped, symlinks=True)

    def passes(self, tests: str, timeout: float) -> bool:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            [*command, "-m", "not slow and not slurm", tests],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                return process.wait(timeout) == 0
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                return False

    def seconds(self, tests: str) -> float | None:
        """How long these tests take without a fault; None: too long, or they fail."""
        if tests not in self._baseline:
            begin = time.monotonic()
            passes = self.passes(tests, self.longest)
            self._baseline[tests] = time.monotonic() - begin if passes else None
        return self._baseline[tests]

    def kills(self, name: str, mutant: Mutant) -> bool | None:
        """Whether a test sees the mutant; None if its tests cannot be run."""
        path = self.folder / "megatron" / name
        source = path.read_text(encoding="utf-8")
        runnable = False
        for tests in [own_tests(name), *([ALSO[name]] if name in ALSO else [])]:
            usual = self.seconds(tests)
            if usual is None:
                continue
            runnable = True
            path.write_text(mutant.apply(source), encoding="utf-8")
            try:
                if not self.passes(tests, 5 * usual + 30):
                    return True
            finally:
                path.write_text(source, encoding="utf-8")
        return False if runnable else None


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutate", description=__doc__)
    parser.add_argument("count", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=600, help="begin no mutant after these")
    parser.add_argument("--longest", type=float, default=300, help="of a test file, in seconds")
    parser.add_argument("--only", default="", metavar="PATTERN", help="modules of this name")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    killed, skipped, survivors = 0, 0, []
    with tempfile.TemporaryDirectory(prefix="mutate-") as place:
        checkout = Checkout(Path(place) / "checkout", options.longest)
        for name, mutant in sample(options.count, options.seed, options.only):
            if time.monotonic() > end:
                break
            seen = checkout.kills(name, mutant)
            killed, skipped = killed + bool(seen), skipped + (seen is None)
            if seen is False:
                survivors.append(f"{name}:{mutant}")
            words = {True: "killed", False: "SURVIVED", None: "not run"}[seen]
            print(f"{words}  {name}:{mutant}", flush=True)
    ran = killed + len(survivors)
    print(f"\n{ran} mutants, {killed} killed, {skipped} not run (their tests take too long)")
    for line in survivors:
        print(f"survived: {line}")
    return int(killed < ENOUGH * ran)


if __name__ == "__main__":
    sys.exit(main())
