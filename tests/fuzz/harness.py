"""Spoil files by the thousand and see that every answer is a result or one of our errors.

python -m tests.fuzz.harness 100000 [--seed 0] [--only KIND] [--jobs 2]

Case n of a kind is the same on every machine. The cases run in a child process: one that crashes or
hangs is counted, named and left out, and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fuzz.target import Target

SECONDS_PER_CASE = 20
MEGABYTES_PER_CASE = 512
CASES_PER_CHILD = 20_000
KINDS_OF_FAILURE = ("foreign exception", "silent damage", "hang", "allocation", "crash")


class HangError(BaseException):
    """A case took too long; no handler of the code under test may catch it."""


def _on_alarm(number: int, frame: FrameType | None) -> None:
    raise HangError


def run_cases(
    cases: range,
    seed: int,
    root: Path,
    names: list[str] | None = None,
    log: Path | None = None,
    end: float = math.inf,
) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Run these cases in this process; how many of each kind and outcome, and the failures."""
    from tests.fuzz.targets import build_targets, cycle

    warnings.simplefilter("ignore")
    targets, kinds = dict(build_targets(root, names)), cycle(names)
    right = {name: _honest_content(target) for name, target in targets.items()}
    signal.signal(signal.SIGALRM, _on_alarm)
    counts: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    for case in cases:
        if time.time() > end:
            break
        name = kinds[case % len(kinds)]
        if log is not None:
            known = {"case": case, "kind": name, "counts": counts, "failures": failures}
            log.write_text(json.dumps(known))
        outcome, detail = _one_case(name, targets[name], case, seed, right[name])
        counts[f"{name}|{outcome}"] += 1
        if outcome in KINDS_OF_FAILURE:
            failures.append({"case": case, "kind": name, "outcome": outcome, "detail": detail})
    return counts, failures


def _honest_content(target: Target) -> object:
    """What is not spoilt is accepted; where content is compared, any of the files gives all."""
    if target.must_be_honest:
        return target.read(target.files[0])
    return [target.read(path) for path in target.files]


def _one_case(name: str, target: Target, case: int, seed: int, right: object) -> tuple[str, str]:
    from megatron.errors import KerpleError
    from tests.fuzz.mutations import mutated

    generator = random.Random(f"{seed}:{name}:{case}")
    path = generator.choice(target.files)
    text = target.text or path.suffix in (".json", ".yml", ".jsonl")
    if target.spoil is not None:
        target.spoil(path, generator)
    else:
        path.write_bytes(mutated(target.honest[path], generator, text=text))
    forged = target.mend is not None and generator.random() < 0.8
    if target.mend is not None and forged:
        target.mend(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome, detail = "accepted", ""
    signal.alarm(SECONDS_PER_CASE)
    try:
        content = target.read(path)
        if target.must_be_honest and not forged and content != right:
            outcome, detail = "silent damage", f"{path.name}: accepted, with other content"
    except KerpleError as error:
        outcome, detail = "refused", str(error)
    except HangError:
        outcome, detail = "hang", traceback.format_exc()
    except BaseException:
        outcome, detail = "foreign exception", traceback.format_exc()
    finally:
        signal.alarm(0)
        _put_back(target, path)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if grown > MEGABYTES_PER_CASE or "allocate memory" in detail or "MemoryError" in detail:
        return "allocation", f"{grown:.0f} MB\n{detail}"
    return outcome, detail


def _put_back(target: Target, path: Path) -> None:
    if path.is_symlink() or not path.is_file():
        path.unlink(missing_ok=True)
    path.write_bytes(target.honest[path])
    if target.mend is not None:
        target.mend(path)


def run_all(
    total: int,
    seed: int,
    names: list[str] | None = None,
    report: Path | None = None,
    jobs: int = 1,
    end: float = math.inf,
) -> tuple[Counter[str], list[dict[str, Any]]]:
    """All cases in child processes, `jobs` at a time."""
    counts: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    parts = [
        range(start, min(start + CASES_PER_CHILD, total))
        for start in range(0, total, CASES_PER_CHILD)
    ]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch, ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(_run_part, part, seed, names, Path(scratch), end) for part in parts]
        for finished in as_completed(waiting):
            found, bad = finished.result()
            counts.update(found)
            failures += bad
            done = sum(counts.values())
            print(f"{done} of {total}, {len(failures)} failures", file=sys.stderr, flush=True)
            _write(report, counts, failures)
    return counts, failures


def _run_part(
    cases: range, seed: int, names: list[str] | None, scratch: Path, end: float
) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Some cases in a child process; after a crash another goes on with the next case."""
    counts: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    part = cases
    while part and time.time() < end:
        log, answer = scratch / f"case{cases.start}.json", scratch / f"answer{cases.start}.json"
        for file in (log, answer):
            file.unlink(missing_ok=True)
        child = [sys.executable, "-m", "tests.fuzz.harness", "--seed", str(seed)]
        child += ["--child", str(part.start), str(part.stop)]
        child += ["--log", str(log), "--answer", str(answer), "--end", str(end)]
        child += [word for name in names or () for word in ("--only", name)]
        done = subprocess.run(child, capture_output=True, text=True, errors="replace")
        if answer.is_file():
            content = json.loads(answer.read_text())
            counts.update(content["counts"])
            failures += content["failures"]
            break
        if not log.is_file():
            raise SystemExit(f"the harness does not start:\n{done.stderr[-3000:]}")
        last = json.loads(log.read_text())
        counts.update(last["counts"])
        counts[f"{last['kind']}|crash"] += 1
        failures += last["failures"]
        crash = {"case": last["case"], "kind": last["kind"], "outcome": "crash"}
        failures.append({**crash, "detail": done.stderr[-3000:]})
        part = range(last["case"] + 1, part.stop)
    return counts, failures


def _write(report: Path | None, counts: Counter[str], failures: list[dict[str, Any]]) -> None:
    """What is known so far: a long run may be cut short."""
    if report is not None:
        report.write_text(json.dumps({"counts": counts, "failures": failures}, indent=1))


def table(counts: Counter[str]) -> str:
    """Kinds by outcomes."""
    kinds = sorted({key.split("|")[0] for key in counts})
    columns = ("accepted", "refused", *KINDS_OF_FAILURE)
    lines = [f"{'':<26}" + "".join(f"{column:>19}" for column in columns)]
    for kind in [*kinds, "all"]:
        chosen = {key: n for key, n in counts.items() if kind in ("all", key.split("|")[0])}
        numbers = [sum(n for key, n in chosen.items() if key.endswith(f"|{c}")) for c in columns]
        lines.append(f"{kind:<26}" + "".join(f"{number:>19}" for number in numbers))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="child processes at a time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no case after these")
    parser.add_argument("--end", type=float, default=math.inf, help=argparse.SUPPRESS)
    parser.add_argument("--child", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
            chosen = (options.seed, Path(scratch), options.only, options.log, options.end)
            counts, failures = run_cases(range(*options.child), *chosen)
        options.answer.write_text(json.dumps({"counts": counts, "failures": failures}))
        return 0
    end = time.time() + 60 * options.minutes
    given = (options.only, options.report, options.jobs, end)
    counts, failures = run_all(options.cases, options.seed, *given)
    print(table(counts))
    for failure in failures[:20]:
        print(f"\ncase {failure['case']} ({failure['kind']}): {failure['outcome']}")
        print(failure["detail"][-1500:])
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
