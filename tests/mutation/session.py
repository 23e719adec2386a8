"""One pytest session for many mutants: collect once, then fork for each and exchange its functions.

    python -m tests.mutation.session JOBS ANSWERS REACHED FILE...

The fork gives each function of the broken module the code of the mutant, so that nothing is
imported again, and runs the tests that reach the changed lines. Which ones do is measured first, in
forks too: a test that takes long or starts Python processes is left to tests/mutation/runner.py.
Of a change outside of functions the module is executed anew, and names imported from it elsewhere
are bound anew; then its own tests run, those that pass when this is done with the right source.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import linecache
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

CPU_SECONDS = 2.0
"""Of a test while its lines are noted; one that takes longer is not part of this session."""
WALL_SECONDS = 1200.0
UNMEASURED = "tests/engines/"
"""Hundreds of tests that all reach the same lines: their module's run in a fixed order instead."""
Lines = dict[str, list[int]]


class TooCostlyError(BaseException):
    """Ends a test that takes long or starts processes; no handler of the code may catch it."""


class Session:
    """The plugin: `pytest_runtestloop` measures, then runs every job."""

    def __init__(self, jobs: list[dict[str, Any]], answers: Path, reached: Path) -> None:
        self.jobs, self.answers, self.reached = jobs, answers, reached
        self.failed = ""
        self.lines: set[tuple[str, int]] = set()
        self.watching = False
        self._controls: dict[str, list[str]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid
        if report.skipped:
            self.skipped = True

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        by_file: dict[str, list[pytest.Item]] = {}
        for item in session.items:
            by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
        known = json.loads(self.reached.read_text()) if self.reached.is_file() else {}
        for file, items in by_file.items():
            if file.startswith(UNMEASURED):
                alike = {"seconds": 0.0, "passes": True, "lines": {}}
                known[file] = {"tests": {item.nodeid: alike for item in items}}
            elif not is_current(known.get(file)):
                known[file] = self._measure(file, items)
                self.reached.write_text(json.dumps(known))
        tests = {name: test for file in by_file for name, test in known[file]["tests"].items()}
        self.tests, self.functions = tests, functions_by_place()
        self.items = {item.nodeid: item for item in session.items}
        for job in self.jobs:
            answer = self._judge(job)
            with self.answers.open("a") as file:
                file.write(json.dumps({"identity": job["identity"], **answer}) + "\n")
        return True

    def _measure(self, file: str, items: list[pytest.Item]) -> dict[str, Any]:
        record = self.reached.with_suffix(".part")
        record.write_text("")

        def child() -> int:
            sys.addaudithook(self._audit)
            signal.signal(signal.SIGPROF, _too_costly)
            sys.settrace(self._called)
            with record.open("a") as out:
                for item, following in zip(items, [*items[1:], None], strict=True):
                    test = self._observed(item, following)
                    out.write(json.dumps([item.nodeid, test]) + "\n")
                    out.flush()
            return 0

        forked(child, WALL_SECONDS, WALL_SECONDS)
        tests = dict(json.loads(line) for line in record.read_text().splitlines())
        names = {file, *(name for test in tests.values() for name in test["lines"])}
        good = sum(test["passes"] for test in tests.values())
        print(f"measured {good} of {len(items)} tests of {file}", file=sys.stderr, flush=True)
        return {"sums": {name: sum_of(name) for name in names}, "tests": tests}

    def _observed(self, item: pytest.Item, following: pytest.Item | None) -> dict[str, Any]:
        self.lines, self.failed, self.skipped = set(), "", False
        begin = time.process_time()
        self.watching = True
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        run_one(item, following)
        signal.setitimer(signal.ITIMER_PROF, 0)
        self.watching = False
        found: Lines = {}
        for name, line in sorted(self.lines):
            found.setdefault(name, []).append(line)
        seconds = round(time.process_time() - begin, 3)
        passes = not self.failed and not self.skipped
        return {"seconds": seconds, "passes": passes, "lines": found}

    def _audit(self, event: str, arguments: Any) -> None:
        if self.watching:
            python = event == "subprocess.Popen" and "python" in str(arguments[1])
            if python or event == "socket.sendmsg":
                self.costly = True
                raise TooCostlyError

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename in TRACED else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines.add((TRACED[frame.f_code.co_filename], frame.f_lineno))
        return self._line

    def _judge(self, job: dict[str, Any]) -> dict[str, Any]:
        """Whether a test sees the mutant; unjudged where none can be run."""
        path = str(Path(job["file"]).resolve())
        changed = exchanges(path, job["source"], self.functions)

        def exchange() -> None:
            for function, code in changed:
                function.__code__ = code
            text = job["source"].splitlines(keepends=True)  # what Triton's interpreter compiles
            linecache.cache[path] = (len(job["source"]), None, text, path)

        if not changed:
            names = self._unmoved(job["file"], path, job["own"][0])
            return self._shown(names, lambda: execute_anew(path, job["source"]), job["seconds"])
        if job["file"].startswith("megatron/engines/"):
            names = [
                name
                for own in job["own"]
                for name in sorted(self.tests, key=self._engine_order)
                if name.partition("::")[0] == own
            ]
            return self._shown(names, exchange, job["seconds"])
        lines = set(range(*job["statement"]))
        reaching = [
            name
            for name, test in self.tests.items()
            if test["passes"] and lines & set(test["lines"].get(job["file"], ()))
        ]
        own = job["own"][0]
        reaching.sort(key=lambda name: (name.partition("::")[0] != own, self._seconds(name)))
        return self._shown(reaching, exchange, job["seconds"])

    def _unmoved(self, file: str, path: str, own: str) -> list[str]:
        """The tests of a module that pass after its right source was executed anew."""
        if file not in self._controls:
            source = Path(path).read_text(encoding="utf-8")
            names = [
                name
                for name, test in self.tests.items()
                if test["passes"] and name.partition("::")[0] == own
            ]
            names.sort(key=self._seconds)
            while names:
                answer = self._shown(names, lambda: execute_anew(path, source), CPU_SECONDS * 10)
                if answer["outcome"] == "survived":
                    break
                failed = answer["by"]
                names = [name for name in names if name != failed] if failed in self.items else []
            self._controls[file] = names
        return self._controls[file]

    def _engine_order(self, name: str) -> tuple[bool, str]:
        """Tests that start no engine take little time: first of all."""
        fixtures = getattr(self.items[name], "fixturenames", ())
        starts = not {"engine", "tiled"}.isdisjoint(fixtures)
        return starts, hashlib.sha256(name.encode()).hexdigest()

    def _seconds(self, name: str) -> float:
        return float(self.tests[name]["seconds"])

    def _shown(self, names: list[str], change: Callable[[], None], most: float) -> dict[str, Any]:
        """What tests say to a change, in a fork, in this order."""
        if not names:
            return {"outcome": "unjudged", "by": "no test here reaches it"}
        chosen, total = [], 0.0
        for name in names:
            total += self._seconds(name)
            if not chosen or total < most:
                chosen.append(self.items[name])
        note = self.answers.with_suffix(".failed")
        note.unlink(missing_ok=True)

        def child() -> int:
            change()
            begin, self.watching = time.process_time(), True
            sys.addaudithook(self._audit)
            for number, item in enumerate(chosen, 1):
                self.costly = False
                run_one(item, chosen[number] if number < len(chosen) else None)
                self.failed = "" if self.costly else self.failed
                note.write_text(self.failed or f"{number} of {len(names)} tests")
                if self.failed or time.process_time() - begin > most:
                    break
            return int(bool(self.failed))

        self.failed = ""
        ended = forked(child, 5 * total + 10 if total else most + 60, WALL_SECONDS)
        by = note.read_text() if note.is_file() else "the first test"
        if ended in (0, 1):
            return {"outcome": "killed" if ended else "survived", "by": by}
        return {"outcome": "killed", "by": f"code {ended} after {by}"}


def run_one(item: pytest.Item, following: pytest.Item | None) -> None:
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


def _too_costly(number: int, frame: FrameType | None) -> None:
    raise TooCostlyError


def forked(action: Callable[[], int], cpu: float, wall: float) -> int:
    """The exit code of `action` in a forked process group; negative: a signal, as after `wall`."""
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        code = 70
        try:
            os.setpgid(0, 0)
            gigabyte = 1 << 30
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu) + 1, int(cpu) + 1))
            resource.setrlimit(resource.RLIMIT_FSIZE, (gigabyte, gigabyte))
            resource.setrlimit(resource.RLIMIT_DATA, (8 * gigabyte, 8 * gigabyte))
            code = action()
        finally:
            os._exit(code)
    end = time.monotonic() + wall
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended or time.monotonic() > end:
            break
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    if not ended:
        status = os.waitpid(process, 0)[1]
    return os.waitstatus_to_exitcode(status)


def functions_by_place() -> dict[tuple[str, str, int], list[FunctionType]]:
    """All functions of the modules, wherever decorators keep them."""
    found: dict[tuple[str, str, int], list[FunctionType]] = {}
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and function.__code__.co_filename in TRACED:
            found.setdefault(_place(function.__code__), []).append(function)
    return found


def exchanges(
    path: str, source: str, functions: dict[tuple[str, str, int], list[FunctionType]]
) -> list[tuple[FunctionType, CodeType]]:
    """Functions of a module and what their code is in the mutant, where that is other code."""
    return [
        (function, code)
        for code in _codes(compile(source, path, "exec", dont_inherit=True))
        for function in functions.get(_place(code), ())
        if function.__code__ != code and function.__code__.co_freevars == code.co_freevars
    ]


def execute_anew(path: str, source: str) -> None:
    """Execute a module's source in its own namespace, and bind what others imported from it."""
    (module,) = (m for m in [*sys.modules.values()] if getattr(m, "__file__", None) == path)
    before = dict(vars(module))
    exec(compile(source, path, "exec", dont_inherit=True), vars(module))
    for other in [*sys.modules.values()]:
        if getattr(other, "__name__", "").partition(".")[0] in ("megatron", "tests", "tools"):
            for name, old in before.items():
                if not name.startswith("__") and vars(other).get(name) is old:
                    setattr(other, name, vars(module)[name])


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, getattr(code, "co_qualname", code.co_name), code.co_firstlineno


def is_current(known: dict[str, Any] | None) -> bool:
    return known is not None and all(sum_of(n) == value for n, value in known["sums"].items())


def sum_of(name: str) -> str:
    return hashlib.sha256(Path(name).read_bytes()).hexdigest()


TRACED: dict[str, str] = {}
"""Absolute path -> path in the checkout, of the modules that are broken."""


def main() -> int:
    jobs, answers, reached, *files = sys.argv[1:]
    content = json.loads(Path(jobs).read_text())
    TRACED.update({str(Path(name).resolve()): name for name in content["modules"]})
    plugin = Session(content["jobs"], Path(answers), Path(reached))
    words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "-W", "ignore"]
    words += ["--continue-on-collection-errors"]
    words += ["-m", "not slow and not slurm", f"--basetemp={answers}.temporary"]
    return int(pytest.main([*words, *files], plugins=[plugin]))


if __name__ == "__main__":
    sys.exit(main())
