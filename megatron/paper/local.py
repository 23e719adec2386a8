"""`tools/reproduce.py run`: a suite on this machine, N runs at a time, resumable."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TextIO

from megatron.errors import ReproduceError
from megatron.paper.execute import Children, Launcher, execute_run, prepare_data, tail
from megatron.paper.run_files import RunState, State, log_path, move_aside, prepare_run, read_state
from megatron.paper.status import duration, progress_of
from megatron.paper.suite import Run, Suite
from megatron.terminal import EXIT_INTERRUPTED

_PLAIN_INTERVAL = 30.0
_TERMINAL_INTERVAL = 0.5


def run_suite(
    suite: Suite,
    jobs: int = 1,
    *,
    retry_failed: bool = False,
    restart_changed: bool = False,
    out: TextIO = sys.stdout,
) -> int:
    """0 if everything is finished, 1 if a run failed, 130 after Ctrl-C."""
    work = _Work(suite, jobs, LiveLines(out))
    todo = work.choose(retry_failed, restart_changed)
    with work.signals_stop():
        work.prepare_data(todo)
        work.execute([run for run in todo if run.base is None])
        work.execute([run for run in todo if run.base is not None])
    return work.conclude(todo)


class _Work:
    """The runs of a suite on this machine, and how each of them ended."""

    def __init__(self, suite: Suite, jobs: int, live: LiveLines) -> None:
        self._suite, self._jobs, self._live = suite, jobs, live
        # Share the cores between the runs, unless the user has decided.
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
        self._children = Children({} if "OMP_NUM_THREADS" in os.environ else threads)
        self._outcomes: dict[str, RunState] = {}
        self._active: dict[str, Run] = {}

    def choose(self, retry_failed: bool, restart_changed: bool) -> list[Run]:
        """Runs to do; writes every config, and notes what earlier attempts left as failed."""
        todo: list[Run] = []
        for run in self._suite.runs:
            if restart_changed and (moved := move_aside(run)):
                self._live.say(f"{run.name}: config changed, the old run is now {moved.name}")
            prepare_run(run)
            state = progress_of(run).state
            if state == State.FAILED and not retry_failed:
                self._outcomes[run.name] = read_state(run.directory)
            elif state != State.DONE:
                todo.append(run)
        total = len(self._suite.runs)
        finished = total - len(todo) - len(self._outcomes)
        self._live.say(f"{self._suite.name}: {self._suite.file.about}")
        self._live.say(f"{total} runs, {finished} finished, {len(todo)} to do")
        return todo

    @contextmanager
    def signals_stop(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM ask the children to save and end; a second Ctrl-C kills them."""

        def stop(number: int, _frame: object) -> None:
            if self._children.stopping:
                self._live.say("killing the runs; their last checkpoints stay")
                self._children.stop(signal.SIGKILL)
                return
            self._live.say("stopping: the runs save and end (Ctrl-C again kills them)")
            self._children.stop(signal.SIGTERM)

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def prepare_data(self, todo: Sequence[Run]) -> None:
        for source in self._suite.used_data:
            users = [run for run in todo if run.data == source.name]
            if users and not self._children.stopping:
                place = source.prefix(self._suite.data_root)
                self._live.say(f"data: {source.title} ({place})")
                prepare_data(self._children, Launcher(), self._suite, users[0])

    def execute(self, todo: Sequence[Run]) -> None:
        started = time.monotonic()
        with ThreadPoolExecutor(self._jobs) as pool:
            futures = [pool.submit(self._execute_one, run) for run in todo]
            while wait(futures, timeout=0.2).not_done:
                ended = sum(name not in self._active for name in self._outcomes)
                elapsed = duration(time.monotonic() - started)
                active = [progress_of(run).line() for run in list(self._active.values())]
                total = f"{ended} of {len(todo)} runs ended, {elapsed} elapsed"
                self._live.show([*active, total])
        self._live.clear()
        for future in futures:
            future.result()  # raise an unexpected exception

    def _execute_one(self, run: Run) -> None:
        if self._children.stopping:
            return
        self._active[run.name] = run
        try:
            outcome = execute_run(self._children, Launcher(), run)
        except (ReproduceError, OSError) as error:
            self._live.say(f"{run.name}: {error}")
            outcome = RunState(State.FAILED, "start")
        del self._active[run.name]
        self._outcomes[run.name] = outcome
        line = progress_of(run).line()
        if outcome.state == State.FAILED:
            line = f"{run.name} failed in step {outcome.step} (exit code {outcome.exit_code})"
        elif outcome.seconds:
            line += f"  ({duration(outcome.seconds)})"
        self._live.say(line)

    def conclude(self, todo: Sequence[Run]) -> int:
        say, outcomes = self._live.say, self._outcomes
        failed = [
            run
            for run in self._suite.runs
            if run.name in outcomes and outcomes[run.name].state == State.FAILED
        ]
        for run in failed:
            state = outcomes[run.name]
            log = log_path(run, state.step)
            say(f"failed: {run.name}, step {state.step}, exit code {state.exit_code}: {log}")
            say(tail(log, 6))
        if failed:
            say("start again with --retry-failed to repeat them")
        if self._children.stopping:
            say("interrupted; the same command continues")
            return EXIT_INTERRUPTED
        unfinished = [run for run in todo if outcomes[run.name].state != State.DONE]
        return 1 if failed or unfinished else 0


# What the terminal shows: live lines that redraw in place.


class LiveLines:
    """Lasting messages above, changing lines below; plain lines now and then without a terminal."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._shown = 0
        self._last = time.monotonic()
        self._lock = threading.RLock()

    def say(self, text: str) -> None:
        with self._lock:
            self.clear()
            self._out.write(text + "\n")
            self._out.flush()

    def show(self, lines: Sequence[str]) -> None:
        """Replace the changing lines, not more often than anyone can read."""
        interval = _TERMINAL_INTERVAL if self._terminal else _PLAIN_INTERVAL
        with self._lock:
            if time.monotonic() - self._last < interval:
                return
            self._last = time.monotonic()
            self.clear()
            width = shutil.get_terminal_size().columns - 1 if self._terminal else None
            self._out.write("".join(line[:width] + "\n" for line in lines))
            self._out.flush()
            self._shown = len(lines)

    def clear(self) -> None:
        with self._lock:
            if self._terminal and self._shown:
                self._out.write(f"\r\033[{self._shown}A\033[J")  # \r: a typed ^C is echoed
                self._out.flush()
            self._shown = 0
