"""The edge of every command: one line for an error, Ctrl-C, closed pipes, missing packages."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.commands import COMMANDS, kerple
from megatron.errors import DataError, MissingPackageError
from megatron.terminal import RUNTIME_PACKAGES, require, run_command, shown_command
from tests.conftest import REPOSITORY

SCRIPTS = ["train", "evaluate", "eval", "generate", "prepare_data", "deepy"]
ALONE = {"lm_eval", "demo", "compare", "extend", "init", "chat", "serve", "watch"}
ALONE |= {"check", "completion"}
TOOLS = sorted(set(COMMANDS) - {*SCRIPTS, *ALONE})


def script(name: str) -> str:
    place = REPOSITORY / f"{name}.py"
    found = [*([place] if place.is_file() else []), *(REPOSITORY / "tools").rglob(f"{name}.py")]
    assert found, f"{name} has no script"
    return str(min(found, key=lambda path: len(path.parts)))


def ending_with(error: BaseException) -> tuple[int, str]:
    def main(argv: object) -> int:
        raise error

    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = run_command(main, [])
    return code, said.getvalue()


def test_errors_of_ours_and_of_the_system_are_one_line() -> None:
    assert ending_with(DataError("data_path x: not there")) == (
        2,
        "error: data_path x: not there\n",
    )
    missing = FileNotFoundError(2, "No such file or directory", "here/there")
    assert ending_with(missing) == (2, "error: here/there: No such file or directory\n")


def test_a_defect_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        ending_with(ZeroDivisionError())
    with pytest.raises(ModuleNotFoundError):
        ending_with(ModuleNotFoundError("x", name="megatron.nowhere"))


LEAVING = """
import atexit, threading, time
from concurrent.futures import ThreadPoolExecutor
from megatron.terminal import exit_with

def command():
    CALL

class Torn:
    def __del__(self):
        print("torn down")

held = Torn()
atexit.register(print, "exit work")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread done"))).start()
pool = ThreadPoolExecutor(1)  # left open, as libraries do: its idle thread waits to be told
pool.submit(int).result()
exit_with(command)
"""


@pytest.mark.parametrize(
    ("call", "code", "text"),
    [
        ("return 7", 7, r""),
        ("return None", 0, r""),
        ("raise SystemExit(2)", 2, r""),
        ("raise SystemExit('a message')", 1, r"a message\n"),
        ("1 / 0", 1, r"Traceback[\s\S]*ZeroDivisionError: division by zero\n"),
    ],
)
def test_leaving_does_the_exit_work_and_spares_the_teardown(
    call: str, code: int, text: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVING.replace("CALL", call)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=60,
    )
    assert done.returncode == code and re.fullmatch(text, done.stderr)
    assert done.stdout.splitlines() == ["thread done", "exit work"]


def test_every_entry_point_ends_by_exit_with() -> None:
    """Whoever calls sys.exit finalizes the interpreter while threads of gloo may be alive."""
    package = (REPOSITORY / "megatron").rglob("*.py")
    for path in [*package, *REPOSITORY.glob("*.py"), *(REPOSITORY / "tools").glob("*.py")]:
        assert not re.search(r"\bsys\.exit\((run|main|kerple)", path.read_text()), path


def test_a_missing_package_is_its_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = ending_with(ModuleNotFoundError("x", name="wandb.sdk"))
    assert code == 2
    assert said == (
        "error: wandb is not installed: pip install -r requirements/requirements-wandb.txt\n"
    )
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPackageError, match=r"export needs transformers.*requirements-hf"):
        require("transformers", "export")
    code, said = ending_with(ModuleNotFoundError("x", name="pydantic"))
    assert code == 2 and "source .venv/bin/activate" in said


def test_every_package_that_is_required_is_missed_in_one_line() -> None:
    lines = (REPOSITORY / "requirements" / "requirements.txt").read_text().splitlines()
    required = {re.split(r"[=<>]", line)[0] for line in lines if not line.startswith("#")}
    assert required - {"PyYAML"} | {"yaml"} == RUNTIME_PACKAGES


def test_ctrl_c_is_one_word_and_130(tmp_path: Path) -> None:
    program = (
        "import sys, time; from megatron.terminal import run_command\n"
        "def main(argv):\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "sys.exit(run_command(main))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore SIGINT, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and errors == "interrupted\n"


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    program = f"{sys.executable} {script('deepy')} --help | head -n 1; echo ${{PIPESTATUS[0]}}"
    many = (
        f'{sys.executable} -c "from megatron.terminal import run_command; import sys; '
        'sys.exit(run_command(lambda a: print(*range(100000), sep=chr(10))))" | head -n 1; '
        "echo ${PIPESTATUS[0]}"
    )
    for command, last in ((program, ("0", "141")), (many, ("141",))):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
        )
        assert done.stderr == "" and done.stdout.split()[-1] in last


def test_library_warnings_are_not_shown_but_ours_are(tmp_path: Path) -> None:
    program = (
        "import sys, warnings; from megatron.terminal import run_command\n"
        "def main(argv):\n"
        "    warnings.warn_explicit('theirs', UserWarning, '/x/site-packages/lib.py', 1)\n"
        "    from megatron import terminal\n"
        "    warnings.warn_explicit('ours', UserWarning, terminal.__file__, 1)\n"
        "sys.exit(run_command(main))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.stderr == "warning: ours\n"


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_without_the_package_says_how_to_install_it(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", script(name), "--help"],  # -S: no site-packages
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert "make install" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_outside_the_environment_says_how_to_enter_it(name: str, tmp_path: Path) -> None:
    """What the README's commands gave without `source .venv/bin/activate`: a traceback."""
    done = subprocess.run(
        [sys.executable, "-S", script(name), "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "is not installed" in line and "source .venv/bin/activate" in line


def test_only_the_start_of_the_tools_changes_the_import_path() -> None:
    for path in [*REPOSITORY.glob("*.py"), *(REPOSITORY / "tools").rglob("*.py")]:
        changes = "sys.path.insert" in path.read_text(encoding="utf-8")
        assert changes == (path.name == "_start.py"), path


def test_the_kerple_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert kerple(["--help"]) == 0
    listing = capsys.readouterr().out
    assert all(f"  {name} " in listing for name in COMMANDS)
    assert kerple(["--version"]) == 0
    assert capsys.readouterr().out.count(".") == 2
    assert kerple(["evalaute"]) == 2
    assert "evalaute: no such command. Did you mean evaluate?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ending:
        kerple(["prepare-data", "--help"])
    assert ending.value.code == 0 and "corpora:" in capsys.readouterr().out


def test_every_subcommand_has_its_script() -> None:
    for name in {*SCRIPTS, *TOOLS}:
        assert name in COMMANDS and Path(script(name)).is_file()


TINY = [str(REPOSITORY / "configs" / "laptop" / "tiny.yml"), "--dry-run"]
HELP = [[name, "--help"] for name in COMMANDS if name != "lm_eval"]  # whose help is lm-eval's own
COUNTING = [
    *([name, *TINY] for name in ("train", "evaluate", "generate")),
    ["deepy", "train", *TINY],
    ["reproduce", "plan", "--suite", "laptop"],
]


@pytest.mark.parametrize("command", [*HELP, *COUNTING], ids=lambda words: " ".join(words)[:24])
def test_help_and_dry_runs_are_there_at_once(command: list[str], tmp_path: Path) -> None:
    """Within 1.5 seconds of the process's own time, and nothing heavy is loaded.

    A dry run and a plan count the model's layers on device meta: they load torch, and the time to
    import that is theirs.
    """
    counts = command in COUNTING
    heavy = ["deepspeed", "matplotlib", *([] if counts else ["torch"])]
    program = (
        "import sys, time; begin = time.process_time()\n"
        f"{'import torch' if counts else ''}\n"
        "begin = time.process_time() - begin; from megatron.commands import run\n"
        f"try: run({command[0]!r}, {command[1:]!r})\n"
        "except SystemExit as ending: assert not ending.code\n"
        f"assert not set({heavy}) & set(sys.modules)\n"
        "used = time.process_time() - begin; assert used < 1.5, used"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "usage:" in done.stdout or "--help" not in command


def test_commands_are_shown_as_they_would_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert shown_command("evaluate") == "python evaluate.py"
    assert shown_command("inspect_checkpoint") == "python tools/inspect_checkpoint.py"
    monkeypatch.chdir(tmp_path)
    assert shown_command("evaluate") == "kerple evaluate"
