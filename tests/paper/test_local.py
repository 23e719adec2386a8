"""`run`: N at a time, resumable, honest about failures. Steps are stand-ins but for one test."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock

from megatron.errors import ReproduceError
from megatron.paper import execute
from megatron.paper.execute import Launcher
from megatron.paper.local import run_suite
from megatron.paper.run_files import RunState, State, read_state, write_state
from megatron.paper.suite import TRAIN, Run, Step, Suite, load_suite
from megatron.terminal import EXIT_INTERRUPTED
from tests.conftest import REPOSITORY
from tests.paper.synthetic import result_name, step_result

STEP = """
import json, pathlib, sys, time
folder, step, seconds, fails, result, content = sys.argv[1:]
with open(folder + "/calls", "a") as file:
    file.write(f"{step} {time.time()}\\n")
if step == "train":
    line = json.dumps({"step": 20, "loss": 4.5, "step_seconds": 0.1})
    pathlib.Path(folder, "metrics.jsonl").write_text(line + "\\n")
time.sleep(float(seconds))
if result and fails != step:
    pathlib.Path(folder, "results").mkdir(exist_ok=True)
    pathlib.Path(folder, "results", result).write_text(content)
sys.exit(3 if fails == step and not pathlib.Path(folder, "mended").exists() else 0)
"""


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Replace the real commands; returns a function that sets what they do."""
    behaviour = {"seconds": "0", "fails": "", "failing": ""}

    def command(_launcher: Launcher, run: Run, step: Step) -> list[str]:
        fails = behaviour["fails"] if run.name.endswith(behaviour["failing"]) else ""
        result, content = "", ""
        if step != TRAIN:
            result, content = result_name(run, step), json.dumps(step_result(run, step))
        place = [str(run.directory), step.name, behaviour["seconds"], fails]
        return [sys.executable, "-c", STEP, *place, result, content]

    monkeypatch.setattr(execute, "step_command", command)
    monkeypatch.setattr(execute, "prepare_command", lambda *_: [sys.executable, "-c", ""])
    return behaviour.update


def smoke(root: Path, *only: str, **sets: object) -> Suite:
    return load_suite("smoke", only or ["main"], runs_root=root, data_root=root, sets=sets)


def calls(suite: Suite, run: int = 0) -> list[str]:
    path = suite.runs[run].directory / "calls"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def run(suite: Suite, **options: object) -> tuple[int, str]:
    out = io.StringIO()
    code = run_suite(suite, out=out, **options)  # type: ignore[arg-type]
    return code, out.getvalue()


def test_every_step_in_order_and_then_nothing(tmp_path: Path, pretend) -> None:  # type: ignore[no-untyped-def]
    suite = smoke(tmp_path)
    assert run(suite, jobs=2)[0] == 0
    assert calls(suite) == [
        "train",
        "extrapolation",
        "positionwise-64",
        "positionwise-64-w32",
    ]
    code, text = run(suite)
    assert code == 0
    assert "4 runs, 4 finished, 0 to do" in text
    assert len(calls(suite)) == 4


def test_runs_go_side_by_side(tmp_path: Path, pretend) -> None:  # type: ignore[no-untyped-def]
    pretend({"seconds": "2"})
    suite = smoke(tmp_path, "alibi")
    run(suite, jobs=2)
    starts = []
    for index in (0, 1):
        path = suite.runs[index].directory / "calls"
        starts.append(float(path.read_text().split()[1]))
    assert abs(starts[0] - starts[1]) < 1.9


def test_only_what_changed_is_repeated(tmp_path: Path, pretend) -> None:  # type: ignore[no-untyped-def]
    run(smoke(tmp_path, "alibi"))
    changed = smoke(tmp_path, "alibi", eval_num_sequences=5)
    assert run(changed)[0] == 0
    assert calls(changed) == ["train", "extrapolation", "extrapolation"]


def test_a_changed_training_config_never_mixes_with_the_old_run(tmp_path: Path, pretend) -> None:  # type: ignore[no-untyped-def]
    run(smoke(tmp_path, "alibi"))
    changed = smoke(tmp_path, "alibi", train_iters=40)
    with pytest.raises(ReproduceError, match="restart-changed"):
        run(changed)
    assert run(changed, restart_changed=True)[0] == 0
    kept = list((tmp_path / "smoke").glob("*.old-*"))
    assert len(kept) == 2
    assert (kept[0] / "metrics.jsonl").exists()


def test_failures_are_reported_and_repeated_on_request_only(tmp_path: Path, pretend) -> None:  # type: ignore[no-untyped-def]
    pretend({"fails": "train", "failing": "1236"})
    suite = smoke(tmp_path, "alibi")
    code, text = run(suite)
    assert code == 1
    assert "failed: smoke.stdlib.alibi.1236, step train, exit code 3" in text
    assert calls(suite, 0) == ["train", "extrapolation"]

    code, text = run(suite)
    assert code == 1
    assert "--retry-failed" in text
    assert calls(suite, 1) == ["train"]

    (suite.runs[1].directory / "mended").touch()
    assert run(suite, retry_failed=True)[0] == 0
    assert calls(suite, 1) == ["train", "train", "extrapolation"]


def test_failed_data_preparation_shows_its_log(tmp_path: Path, pretend, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    bad = [sys.executable, "-c", "import sys; print('no space left'); sys.exit(4)"]
    monkeypatch.setattr(execute, "prepare_command", lambda *_: bad)
    with pytest.raises(ReproduceError, match=r"(?s)preparing stdlib failed.*no space left"):
        run(smoke(tmp_path, "alibi"))


def test_ctrl_c_saves_and_the_same_command_continues(tmp_path: Path, pretend) -> None:  # type: ignore[no-untyped-def]
    pretend({"seconds": "30"})
    suite = smoke(tmp_path, "alibi")
    directory = suite.runs[0].directory

    def press_ctrl_c() -> None:
        while not (directory / "metrics.jsonl").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    import threading

    threading.Thread(target=press_ctrl_c).start()
    started = time.monotonic()
    code, text = run(suite)
    assert code == EXIT_INTERRUPTED
    assert time.monotonic() - started < 15
    assert "the same command continues" in text
    assert read_state(directory).state == State.INTERRUPTED

    pretend({"seconds": "0"})
    assert run(suite)[0] == 0


def test_two_commands_do_not_work_on_one_run(tmp_path: Path, pretend) -> None:  # type: ignore[no-untyped-def]
    suite = smoke(tmp_path, "alibi", "*.1235")
    directory = suite.runs[0].directory
    directory.mkdir(parents=True)
    with FileLock(directory / ".reproduce.lock"):
        code, text = run(suite)
    assert code == 1
    assert "another process works on this run" in text


def test_the_lock_of_another_host_is_waited_for(
    tmp_path: Path,
    pretend,  # type: ignore[no-untyped-def]
) -> None:
    """A requeued job: the file server still has the lock of the node that was lost."""
    suite = smoke(tmp_path, "alibi", "*.1235")
    directory = suite.runs[0].directory
    directory.mkdir(parents=True)
    write_state(directory, RunState(State.RUNNING, "train", None, 1.0, 7, "lost-node"))
    lock = FileLock(directory / ".reproduce.lock", thread_local=False)
    lock.acquire()
    import threading

    pretend({"seconds": "0"})
    timer = threading.Timer(1.0, lock.release)
    timer.start()
    code, text = run(suite)
    timer.join()
    assert code == 0, text


def test_the_real_thing_once(tmp_path: Path) -> None:
    """Data, training, evaluation and report of one tiny run through the command line."""
    command = [sys.executable, "tools/reproduce.py", "run", "--suite", "smoke"]
    command += ["--runs", str(tmp_path / "runs"), "--data", str(tmp_path / "data")]
    command += ["--only", "alibi", "*.1235"]
    result = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 runs, 0 finished, 1 to do" in result.stdout
    assert "Python standard library" in result.stdout
    page = (tmp_path / "runs" / "smoke" / "report" / "report.html").read_text(encoding="utf-8")
    assert "1 of 1 finished" in page
