"""Whether the tests see small faults: `python -m tests.mutation.harness N [--seed 0]`.

A fixed sample of N mutants of the modules below. tests/mutation/session.py shows each to the fast
tests that reach its line. What these cannot judge is written into a copy of the checkout, where
tests/mutation/runner.py runs the other tests of the module's own file. A mutant is killed by a
failing test or by a run that takes too long; survivors are listed, those that change no result with
the reason (tests/mutation/argued.py). Exit code 1 if less than 90% were killed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.conftest import REPOSITORY
from tests.mutation.argued import ARGUED
from tests.mutation.mutants import Mutant, mutants_of
from tests.test_house import TESTED_BY

PLACES = ("checkpoints", "data", "engines")
FILES = ("atomic_files.py", "training/optimizer.py", "backends/optimizers.py")
INTERPRETED = sorted(
    path.relative_to(REPOSITORY).as_posix()
    for path in REPOSITORY.glob("tests/engines/triton_interpreted*.py")
)
"""Tests of the Triton kernels, for which TRITON_INTERPRET must be set before the first import."""
WIDER = {"engines": ["tests/engines/test_engines.py", *INTERPRETED]}
SECONDS, INTERPRETED_SECONDS = 8.0, 300.0
"""Of CPU, for the tests of one mutant; one that lives meets all tests in Triton's interpreter."""
ENOUGH = 0.9
Sample = list[tuple[str, Mutant]]


def modules() -> list[str]:
    root = REPOSITORY / "megatron"
    found = [path for place in PLACES for path in (root / place).rglob("*.py")]
    names = [path.relative_to(root).as_posix() for path in found if path.name != "__init__.py"]
    return sorted([*names, *FILES])


def sample(count: int, seed: int, only: str = "") -> Sample:
    """The first ones of a fixed order, which a change of the code leaves to all other mutants.

    `only`: those of them that are in modules of this name.
    """

    def order(item: tuple[str, Mutant]) -> str:
        return hashlib.sha256(f"{seed}:{identity(*item)}".encode()).hexdigest()

    everything = [
        (name, mutant)
        for name in modules()
        for mutant in mutants_of((REPOSITORY / "megatron" / name).read_text(encoding="utf-8"))
    ]
    return [item for item in sorted(everything, key=order)[:count] if re.search(only, item[0])]


def identity(name: str, mutant: Mutant) -> str:
    return f"{name}: {mutant.identity}"


def own_tests(name: str) -> str:
    own = Path(name).with_name(f"test_{Path(name).name}").as_posix()
    return f"tests/{TESTED_BY.get(name, own)}"


def wider_tests(name: str) -> list[str]:
    """Tests of the whole package; first those of the kernels in this module."""
    part = Path(name).stem.rpartition("_")[2]
    files = WIDER.get(name.partition("/")[0], [])
    return sorted(files, key=lambda file: not Path(file).stem.endswith(f"_{part}"))


class Checkout:
    """A copy to break, and what its tests say."""

    def __init__(self, folder: Path, kept: Path) -> None:
        self.folder, self.kept = folder / "checkout", kept
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        skipped = shutil.ignore_patterns(
            ".git", ".venv", "*.egg-info", "dist", "build", "runs", "__pycache__"
        )
        shutil.copytree(REPOSITORY, self.folder, ignore=skipped, symlinks=True)
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        self._runner: subprocess.Popen[str] | None = None

    def fast(self, chosen: Sample, name: str, files: list[str], **variables: str) -> dict[str, Any]:
        """The answers of one session by identity."""
        jobs, answers = self.scratch / f"{name}.json", self.scratch / f"{name}.jsonl"
        content = [
            {
                "identity": identity(module, mutant),
                "file": f"megatron/{module}",
                "source": mutant.apply((self.folder / "megatron" / module).read_text("utf-8")),
                "statement": [mutant.statement.start, mutant.statement.stop],
                "own": [own_tests(module), *wider_tests(module)],
                "seconds": INTERPRETED_SECONDS if name == "interpreted" else SECONDS,
            }
            for module, mutant in chosen
        ]
        listed = [f"megatron/{module}" for module in modules()]
        jobs.write_text(json.dumps({"modules": listed, "jobs": content}))
        reached = self.kept / f"{name}_reached.json"
        words = [sys.executable, "-m", "tests.mutation.session", str(jobs), str(answers)]
        log = (self.kept / f"{name}.log").open("w")
        subprocess.run(
            [*words, str(reached), *files],
            cwd=self.folder,
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
        lines = answers.read_text().splitlines() if answers.is_file() else []
        return {answer.pop("identity"): answer for answer in map(json.loads, lines)}

    def slow(self, name: str, mutant: Mutant, longest: float) -> dict[str, Any]:
        """The whole test file of a module, the broken one imported by new processes."""
        path = self.folder / "megatron" / name
        source, times = path.read_text(encoding="utf-8"), path.stat()
        path.write_text(mutant.apply(source), encoding="utf-8")
        os.utime(path, (1e9, 1e9))  # no compiled file has this date
        try:
            answer = self._run([own_tests(name)], longest)
        finally:
            path.write_text(source, encoding="utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        if answer["outcome"] == "passed":
            return {"outcome": "survived", "by": own_tests(name)}
        return {"outcome": "killed", "by": answer["failed"] or answer["outcome"]}

    def _run(self, tests: list[str], timeout: float) -> Any:
        if self._runner is None:
            program = str(self.folder / "tests/mutation/runner.py")
            self._runner = subprocess.Popen(
                [sys.executable, "-u", program, str(self.scratch)],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._runner.stdin is not None and self._runner.stdout is not None
        self._runner.stdin.write(json.dumps({"tests": tests, "timeout": timeout}) + "\n")
        self._runner.stdin.flush()
        return json.loads(self._runner.stdout.readline())

    def stop(self) -> None:
        if self._runner is not None and self._runner.stdin is not None:
            self._runner.stdin.close()
            self._runner.wait()


def judge(
    checkout: Checkout, chosen: Sample, end: float, longest: float
) -> dict[str, dict[str, Any]]:
    """What became of each mutant."""
    verdicts: dict[str, dict[str, Any]] = {}

    def show(session: str, items: Sample) -> None:
        left = [item for item in items if not _is_killed(verdicts, item)]
        files = {own_tests(name) for name, _ in left}
        if any(name.startswith("engines/") for name, _ in left):
            files.add(WIDER["engines"][0])
        if session == "interpreted":
            found = checkout.fast(left, session, INTERPRETED, TRITON_INTERPRET="1") if left else {}
        else:
            found = checkout.fast(left, session, sorted(files)) if left else {}
        for key, value in found.items():
            if value["outcome"] != "unjudged" or key not in verdicts:
                verdicts[key] = value

    # The other tests run no kernel without a GPU.
    show("interpreted", [item for item in chosen if has_kernels(item[0])])
    show("fast", chosen)
    show(
        "interpreted", [item for item in chosen if "triton" in item[0] and not has_kernels(item[0])]
    )
    for name, mutant in chosen:
        key = identity(name, mutant)
        if not _is_killed(verdicts, (name, mutant)) and time.monotonic() < end:
            slow = checkout.slow(name, mutant, longest)
            verdicts[key] = slow if slow["outcome"] == "killed" else verdicts[key]
            print(f"{slow['outcome']:<9} {key}  [{slow['by']}]", flush=True)
    return verdicts


def has_kernels(name: str) -> bool:
    return "\n@jit(" in (REPOSITORY / "megatron" / name).read_text(encoding="utf-8")


def _is_killed(verdicts: dict[str, dict[str, Any]], item: tuple[str, Mutant]) -> bool:
    return verdicts.get(identity(*item), {}).get("outcome") == "killed"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutate", description=__doc__)
    parser.add_argument("count", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=float, default=600, help="run no slow tests after these; 0: none"
    )
    parser.add_argument("--longest", type=float, default=600, help="of slow tests, in seconds")
    parser.add_argument("--only", default="", metavar="PATTERN", help="modules of this name")
    parser.add_argument(
        "--keep", type=Path, help="folder for what tests reach and kill, used again by the next run"
    )
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    chosen = sample(options.count, options.seed, options.only)
    with tempfile.TemporaryDirectory(prefix="mutate-") as place:
        kept = options.keep or Path(place)
        kept.mkdir(parents=True, exist_ok=True)
        record = kept / "verdicts.json"
        before = json.loads(record.read_text()) if record.is_file() else {}
        verdicts = {key: value for key, value in before.items() if value["outcome"] == "killed"}
        verdicts |= {key: {"outcome": "argued", "by": why} for key, why in ARGUED.items()}
        checkout = Checkout(Path(place), kept)
        left = [item for item in chosen if identity(*item) not in verdicts]
        verdicts |= judge(checkout, left, end, options.longest) if left else {}
        checkout.stop()
        record.write_text(json.dumps({**before, **verdicts}, indent=1))
    return report(chosen, verdicts)


def report(chosen: Sample, verdicts: dict[str, dict[str, Any]]) -> int:
    counts: Counter[str] = Counter()
    for name, mutant in chosen:
        verdict = verdicts[identity(name, mutant)]
        counts[verdict["outcome"]] += 1
        if verdict["outcome"] != "killed":
            place = f"megatron/{name}:{mutant.line} {mutant.identity}"
            print(f"{verdict['outcome']}: {place}  [{verdict['by']}]")
    words = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
    print(f"{len(chosen)} mutants: {words}")
    return int(counts["killed"] < ENOUGH * len(chosen))


if __name__ == "__main__":
    sys.exit(main())
