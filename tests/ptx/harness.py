"""Run cases in the emulator, with one or several Tritons.

    python -m tests.ptx.harness quick                 # what `make test` runs
    python -m tests.ptx.harness every --triton 3.7.1 --triton 3.9.0 --page docs/triton.md
    python -m tests.ptx.harness every --only "D 128.*weight"
    python -m tests.ptx.harness mutate --page docs/triton.md

A Triton that is not the installed one is installed into a temporary folder. `--page` writes the
table between its markers. Exit status 1 if a number is wrong or a check finds something.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.conftest import REPOSITORY

ARCHITECTURES = (80, 90)


def main(arguments: Sequence[str] | None = None) -> int:
    args = _arguments(arguments)
    if args.what == "quick" or args.arch:
        return _run_here(args)
    if args.what == "mutate":
        return _mutate(args)
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            Run(triton, arch, Path(folder) / f"{triton}-{arch}")
            for triton in args.triton or [version("triton")]
            for arch in ARCHITECTURES
        ]
        sites = {triton: _site(triton, Path(folder)) for triton in {run.triton for run in runs}}
        with ThreadPoolExecutor(args.jobs) as pool:
            good = list(pool.map(lambda run: run.start(sites[run.triton], args), runs))
    table = _table(runs)
    print(table)
    if args.page:
        write_between_markers(Path(args.page), "emulator", table)
    return 0 if all(good) else 1


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("quick", "every", "mutate"))
    parser.add_argument("--triton", action="append", help="a version; may be given several times")
    parser.add_argument("--only", default="", help="a regular expression over the cases' names")
    parser.add_argument("--seed", type=int, default=0, help="of the random sizes")
    parser.add_argument("--sizes", type=int, default=16, help="how many random sizes")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--each", type=int, default=3, help="mutations of each kind and kernel")
    parser.add_argument("--page", help="the page to write the table to")
    parser.add_argument("--arch", type=int, help="run the cases of one GPU in this process")
    parser.add_argument("--json", help="write the outcomes there (with --arch)")
    return parser.parse_args(arguments)


# In a process of its own: patches, and compiled kernels without machine code


def _run_here(args: argparse.Namespace) -> int:
    _own_cache()
    import torch

    from tests.ptx.comparison import name_of, run_case
    from tests.ptx.shipped import QUICK, every_case

    torch.set_num_threads(1)
    cases = QUICK if args.what == "quick" else every_case(args.arch, args.seed, args.sizes)
    records: list[dict[str, Any]] = []
    for case in cases:
        if re.search(args.only, name_of(case)):
            outcome = run_case(case)
            print(outcome.line(), flush=True)
            shown = vars(outcome) | {"case": name_of(case), "good": outcome.good}
            records.append(shown | {"dtype": str(case.dtype).removeprefix("torch.")})
            if args.json:  # after every case: an interrupted run still says what it did
                Path(args.json).write_text(json.dumps(records), encoding="utf-8")
    return 0 if all(record["good"] for record in records) else 1


def _own_cache() -> None:
    """Of kernels without machine code; a folder that PTX_CACHE names is kept for the next run."""
    import triton

    folder = os.environ.get("PTX_CACHE") or tempfile.mkdtemp(prefix="ptx-emulator-")
    os.environ["TRITON_CACHE_DIR"] = str(Path(folder) / triton.__version__)


def _site(triton: str, folder: Path) -> str | None:
    """The folder to import this version from; None for the installed one."""
    if triton == version("triton"):
        return None
    target = folder / f"site-{triton}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*command, str(target), f"triton=={triton}"], check=True)
    return str(target)


@dataclass
class Run:
    """All cases with one Triton and one GPU."""

    triton: str
    arch: int
    folder: Path
    outcomes: list[dict[str, Any]] = field(default_factory=list)

    def start(self, site: str | None, args: argparse.Namespace) -> bool:
        paths = [str(REPOSITORY)] if site is None else [site, str(REPOSITORY)]
        self.folder.mkdir(exist_ok=True)
        outcomes = self.folder / "outcomes.json"
        command = [sys.executable, "-m", "tests.ptx.harness", args.what, "--only", args.only]
        command += ["--seed", str(args.seed), "--sizes", str(args.sizes)]
        result = subprocess.run(
            [*command, "--arch", str(self.arch), "--json", str(outcomes)],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )
        if outcomes.is_file():
            self.outcomes = json.loads(outcomes.read_text(encoding="utf-8"))
        return result.returncode == 0


# The table

_HEADER = (
    "Triton", "GPU", "dtype", "configurations", "launches", "out", "gradients", "wrong", "findings",
)  # fmt: skip


def _table(runs: Sequence[Run]) -> str:
    rows = [_HEADER, ("---",) * len(_HEADER)]
    for run in runs:
        dtypes = dict.fromkeys(outcome["dtype"] for outcome in run.outcomes)
        rows += [(run.triton, f"sm_{run.arch}", *_row(run, dtype)) for dtype in sorted(dtypes)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _row(run: Run, dtype: str) -> tuple[str, ...]:
    outcomes = [outcome for outcome in run.outcomes if outcome["dtype"] == dtype]
    launches = sum(sum(outcome["launches"].values()) for outcome in outcomes)
    wrong = sum(bool(outcome["wrong"]) for outcome in outcomes)
    findings = sum(bool(outcome["findings"]) for outcome in outcomes)
    worst = (_worst(outcomes, lambda n: n == "out"), _worst(outcomes, lambda n: n != "out"))
    return (dtype, str(len(outcomes)), str(launches), *worst, str(wrong), str(findings))


def _worst(outcomes: Sequence[dict[str, Any]], wanted: Any) -> str:
    """The largest relative error of all cases: root mean square / largest."""
    pairs = [pair for o in outcomes for name, pair in o["errors"].items() if wanted(name)]
    if not pairs:
        return "-"
    return " / ".join(f"{max(values):.0e}" for values in zip(*pairs, strict=True))


def write_between_markers(page: Path, name: str, text: str) -> None:
    before, after = f"<!-- {name} -->", f"<!-- end {name} -->"
    old = page.read_text(encoding="utf-8")
    start, end = old.index(before) + len(before), old.index(after)
    page.write_text(f"{old[:start]}\n{text}\n{old[end:]}", encoding="utf-8")


def _mutate(args: argparse.Namespace) -> int:
    _own_cache()
    import torch

    from tests.ptx.mutations import run_mutations

    torch.set_num_threads(1)
    table = run_mutations(args.each, args.seed)
    print(table)
    if args.page:
        write_between_markers(Path(args.page), "mutations", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
