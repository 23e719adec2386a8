"""`tools/reproduce.py run`: a suite on this machine, N runs at a time, resumable."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from megatron.errors import ReproduceError
from megatron.paper.execute import Children, Launcher, execute_run, prepare_data, tail
from megatron.paper.run_files import RunState, State, move_aside, prepare_run, read_state
from megatron.paper.status import duration, progress_of
from megatron.paper.suite import Run, Suite

EXIT_INTERRUPTED = 130
_PLAIN_INTERVAL = 30.0
_TERMINAL_INTERVAL = 0.5


@dataclass(frozen=True)
class LocalOptions:
    jobs: int = 1
    retry_failed: bool = False
    restart_changed: bool = False


@dataclass
class _Work:
    suite: Suite
    root: Path
    options: LocalOptions
    children: Children = field(default_factory=Children)
    outcomes: dict[str, RunState] = field(default_factory=dict)
    active: dict[str, Run] = field(default_factory=dict)
    waiting: queue.Queue[Run] = field(default_factory=queue.Queue)

    def directory(self, run: Run) -> Path:
        return self.suite.run_directory(self.root, run)


def run_suite(suite: Suite, root: Path, options: LocalOptions, out: TextIO = sys.stdout) -> int:
    """0 if everything is finished, 1 if a run failed, 130 after Ctrl-C."""
    work = _Work(suite, root, options)
    live = LiveLines(out)
    todo, skipped = _choose(work, live)
    live.say(f"{suite.name}: {len(suite.runs)} runs, {skipped} finished, {len(todo)} to do")
    environment = _thread_environment(options.jobs)
    with _signals_stop(work.children, live):
        if todo:
            _prepare_all_data(work, todo, environment, live)
        _run_all(work, todo, environment, live)
    return _conclude(work, todo, live)


def _choose(work: _Work, live: LiveLines) -> tuple[list[Run], int]:
    """Runs to do; writes every config, and reports what earlier attempts left as failed."""
    todo: list[Run] = []
    skipped = 0
    for run in work.suite.runs:
        directory = work.directory(run)
        if work.options.restart_changed and (moved := move_aside(directory, run)):
            live.say(f"{run.name}: config changed, the old run is now {moved.name}")
        prepare_run(directory, work.suite.name, run)
        state = progress_of(directory, run).state
        if state == State.DONE:
            skipped += 1
        elif state == State.FAILED and not work.options.retry_failed:
            work.outcomes[run.name] = read_state(directory)
        else:
            todo.append(run)
    return todo, skipped


def _thread_environment(jobs: int) -> dict[str, str]:
    """Share the cores between the runs, unless the user has decided."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}


@contextmanager
def _signals_stop(children: Children, live: LiveLines) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask the children to save and end; a second Ctrl-C kills them."""

    def stop(number: int, _frame: object) -> None:
        if children.stopping:
            live.say("killing the runs; their last checkpoints stay")
            children.stop(signal.SIGKILL)
            return
        live.say("stopping: the runs save and end (once more to kill them)")
        children.stop(signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _prepare_all_data(
    work: _Work, todo: list[Run], environment: dict[str, str], live: LiveLines
) -> None:
    for source in work.suite.used_data:
        users = [run for run in todo if run.data == source.name]
        if not users or work.children.stopping:
            continue
        live.say(f"data: {source.title} ({source.prefix(work.suite.data_root)})")
        log = work.root / work.suite.name / "logs" / f"prepare-{source.name}.log"
        root = work.suite.data_root
        prepare_data(work.children, source, root, users[0], log, environment)


def _run_all(work: _Work, todo: list[Run], environment: dict[str, str], live: LiveLines) -> None:
    for run in todo:
        work.waiting.put(run)
    threads = [
        threading.Thread(target=_worker, args=(work, environment, live.say))
        for _ in range(min(work.options.jobs, len(todo)))
    ]
    for thread in threads:
        thread.start()
    started = time.monotonic()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.2)
        live.show(_lines(work, len(todo), time.monotonic() - started))
    live.clear()


def _lines(work: _Work, total: int, elapsed: float) -> list[str]:
    finished = sum(name not in work.active for name in work.outcomes)
    active = [progress_of(work.directory(run), run).line() for run in list(work.active.values())]
    return [*active, f"{finished} of {total} runs ended, {duration(elapsed)} elapsed"]


def _worker(work: _Work, environment: dict[str, str], say: Callable[[str], None]) -> None:
    while not work.children.stopping:
        try:
            run = work.waiting.get_nowait()
        except queue.Empty:
            return
        work.active[run.name] = run
        try:
            outcome = execute_run(work.children, Launcher(), work.directory(run), run, environment)
        except (ReproduceError, OSError) as error:
            say(f"{run.name}: {error}")
            outcome = RunState(State.FAILED, "start")
        del work.active[run.name]
        work.outcomes[run.name] = outcome
        say(_outcome_line(work.directory(run), run, outcome))


def _outcome_line(directory: Path, run: Run, outcome: RunState) -> str:
    line = progress_of(directory, run).line()
    if outcome.state == State.FAILED:
        return f"{run.name} failed in step {outcome.step} (exit code {outcome.exit_code})"
    return f"{line}  ({duration(outcome.seconds)})" if outcome.seconds else line


def _conclude(work: _Work, todo: list[Run], live: LiveLines) -> int:
    failed = [
        run
        for run in work.suite.runs
        if (state := work.outcomes.get(run.name)) and state.state == State.FAILED
    ]
    for run in failed:
        state = work.outcomes[run.name]
        log = work.directory(run) / "logs" / f"{state.step}.log"
        live.say(f"failed: {run.name}, step {state.step}, exit code {state.exit_code}: {log}")
        live.say(tail(log, 6))
    if failed:
        live.say("start again with --retry-failed to repeat them")
    if work.children.stopping:
        live.say("interrupted; the same command continues")
        return EXIT_INTERRUPTED
    unfinished = [run for run in todo if work.outcomes[run.name].state != State.DONE]
    return 1 if failed or unfinished else 0


# What the terminal shows: live lines that redraw in place.


class LiveLines:
    """Lasting messages above, changing lines below; plain lines now and then without a terminal."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._shown = 0
        self._last = 0.0
        self._lock = threading.RLock()

    def say(self, text: str) -> None:
        with self._lock:
            self.clear()
            self._out.write(text + "\n")
            self._out.flush()

    def show(self, lines: Sequence[str]) -> None:
        """Replace the changing lines, not more often than anyone can read."""
        with self._lock:
            now = time.monotonic()
            interval = _TERMINAL_INTERVAL if self._terminal else _PLAIN_INTERVAL
            if now - self._last < interval:
                return
            first = self._last == 0.0
            self._last = now
            if not self._terminal:
                if not first:
                    self._out.write("\n".join(lines) + "\n")
                    self._out.flush()
                return
            self.clear()
            width = shutil.get_terminal_size().columns - 1
            self._out.write("".join(line[:width] + "\n" for line in lines))
            self._out.flush()
            self._shown = len(lines)

    def clear(self) -> None:
        with self._lock:
            if self._terminal and self._shown:
                self._out.write(f"\033[{self._shown}A\033[J")
                self._out.flush()
            self._shown = 0
