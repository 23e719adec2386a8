"""The command line of tools/reproduce.py."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.errors import ReproduceError
from megatron.neox_arguments.command_line import add_allow_kernel_argument, add_set_argument
from megatron.paper.cells import ALPHA
from megatron.paper.slurm import ClusterOptions
from megatron.paper.suite import Suite, load_suite, parsed_sets
from megatron.paper.suite_file import available_suites
from megatron.terminal import command_parser, exit_with, run_command, shown_command

if TYPE_CHECKING:
    from megatron.paper.tables import Table

EXAMPLES = """examples:
  python tools/reproduce.py plan --suite paper
  python tools/reproduce.py run --suite laptop -j 2
  python tools/reproduce.py run --suite laptop --only main stdlib kerple_log alibi
  python tools/reproduce.py submit --suite paper --only main --account my_project \\
      --partition a100 --time 24:00:00 --dry-run
  python tools/reproduce.py status --suite paper --watch
  python tools/reproduce.py report --suite paper --out docs/results/paper
  python tools/reproduce.py released --dir kerple_release --text my_book.txt
  python tools/reproduce.py pack --suite study --out docs/results/study/runs.tar.gz
  python tools/reproduce.py report --suite study --runs docs/results/study/runs.tar.gz
"""


def build_parser() -> argparse.ArgumentParser:
    about = "Reproduce the KERPLE paper, in full on a cluster or in miniature on a laptop."
    parser = command_parser("tools/reproduce.py", about, EXAMPLES, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = _common_arguments()
    for name, (_, text) in _COMMANDS.items():
        parents = [] if name == "released" else [common]
        shown: dict[str, Any] = {"help": text, "description": text} if text else {}
        commands.add_parser(name, parents=parents, allow_abbrev=False, **shown)
    _released_arguments(commands.choices["released"])
    _plan_and_run_arguments(commands.choices)
    _submit_arguments(commands.choices["submit"])
    _other_arguments(commands.choices)
    return parser


def _common_arguments() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    names = ", ".join(available_suites())
    common.add_argument(
        "--suite", required=True, help=f"{names}, one section (paper/main), or a file of yours"
    )
    common.add_argument(
        "--only",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="sections, methods, data sets, or run names with wildcards",
    )
    common.add_argument(
        "--runs",
        default="runs",
        metavar="DIR",
        help="directory of runs (runs); for report and status also a file that `pack` wrote",
    )
    common.add_argument("--data", default="data", metavar="DIR", help="where data lives (data)")
    add_allow_kernel_argument(common)
    add_set_argument(common, "config values for every run, e.g. train_iters=100")
    return common


def _released_arguments(released: argparse.ArgumentParser) -> None:
    released.add_argument(
        "--dir", type=Path, required=True, help="where the release's archives are unpacked"
    )
    released.add_argument(
        "--text", type=Path, nargs="+", default=[], help="any text or jsonl to evaluate on"
    )
    released.add_argument("--out", type=Path, default=Path("runs/released"), metavar="DIR")
    released.add_argument("--tokenizer", default="GPT2BPETokenizer", help="(GPT2BPETokenizer)")
    released.add_argument("--vocab-file", type=Path, help="(data/gpt2-vocab.json)")
    released.add_argument("--merge-file", type=Path, help="(data/gpt2-merges.txt)")
    lengths = [512, 1024, 2048, 4096, 8192, 16384]
    released.add_argument("--lengths", type=int, nargs="+", default=lengths, metavar="N")
    released.add_argument("--window", type=int, default=512, metavar="N", help="(512)")
    released.add_argument(
        "--sequences", type=int, default=8, metavar="N", help="at the longest length (8)"
    )


def _plan_and_run_arguments(commands: Any) -> None:
    commands["plan"].add_argument(
        "--write", action="store_true", help="write every run's config.yml"
    )
    commands["plan"].add_argument("--list", action="store_true", help="list every run")
    run = commands["run"]
    run.add_argument("-j", "--jobs", type=int, default=1, metavar="N", help="runs at a time (1)")
    run.add_argument("--retry-failed", action="store_true", help="repeat runs that failed")
    run.add_argument(
        "--restart-changed",
        action="store_true",
        help="move runs with another training config aside and train them again",
    )
    run.add_argument("--no-report", action="store_true", help="do not write the report at the end")


def _submit_arguments(submit: argparse.ArgumentParser) -> None:
    """One option per field of ClusterOptions; those not given stay out of the namespace."""
    submit.add_argument("--cluster", metavar="FILE", help="YAML file with the options below")
    submit.add_argument("--dry-run", action="store_true", help="print the scripts, submit nothing")
    for name, field in ClusterOptions.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        common: dict[str, Any] = {"help": field.description, "default": argparse.SUPPRESS}
        if field.default is False:
            submit.add_argument(flag, action="store_true", **common)
        elif field.default == ():
            submit.add_argument(flag, action="append", metavar="TEXT", **common)
        elif name == "gpus_per_task":
            submit.add_argument(flag, choices=["all", "one"], **common)
        else:
            submit.add_argument(flag, metavar=name.split("_")[-1].upper(), **common)


def _other_arguments(commands: Any) -> None:
    commands["logs"].add_argument("run", nargs="?", help="a run or data set (the failed ones)")
    commands["logs"].add_argument("--lines", type=int, default=40, metavar="N", help="(40)")
    commands["status"].add_argument("--watch", action="store_true", help="repeat every 10 s")
    commands["report"].add_argument("--out", metavar="DIR", help="(runs/SUITE/report)")
    commands["pack"].add_argument("--out", required=True, metavar="FILE", help="NAME.tar.gz")
    worker = commands["worker"]
    worker.add_argument("--tasks", default="", help="file with one run or data set a line")
    worker.add_argument("--container", default="")
    worker.add_argument("--python", default=sys.executable)
    worker.add_argument("--one-gpu-per-task", action="store_true")
    worker.add_argument("stage", choices=["data", "train", "evaluate", "report"])
    worker.add_argument("--index", type=int, default=0)


def main(argv: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    options.words = list(sys.argv[1:] if argv is None else argv)
    command = _COMMANDS[options.command][0]
    if not Path(getattr(options, "runs", "")).is_file():
        return command(options)
    if options.command not in ("report", "status"):
        raise ReproduceError(
            f"--runs {options.runs}: a packed file, which only report and status read; unpack it "
            "into a folder with `tar xf`"
        )
    from megatron.paper.run_archive import unpacked

    with unpacked(Path(options.runs)) as folder:
        # The report goes beside the archive, not into the temporary folder.
        if options.command == "report":
            options.out = options.out or str(Path(options.runs).parent / "report")
        options.runs = str(folder)
        return command(options)


def _suite(options: argparse.Namespace) -> Suite:
    return load_suite(
        options.suite,
        options.only,
        runs_root=Path(options.runs),
        data_root=Path(options.data),
        sets=parsed_sets(options.sets),
    )


def _plan(options: argparse.Namespace) -> int:
    from megatron.paper.plan import plan_text
    from megatron.paper.run_files import prepare_run

    suite = _suite(options)
    print(plan_text(suite), end="")
    if options.list:
        print("\n".join(["", *(run.name for run in suite.runs)]))
    if options.write:
        for run in suite.runs:
            prepare_run(run)
        print(f"{len(suite.runs)} configs written: {suite.directory}/*/config.yml")
    return 0


def _run(options: argparse.Namespace) -> int:
    from megatron.paper.local import run_suite
    from megatron.paper.run_files import record_command

    if options.jobs < 1:
        raise ReproduceError(f"-j {options.jobs}: at least one run at a time")
    suite = _suite(options)
    started = time.monotonic()
    code = run_suite(
        suite,
        options.jobs,
        retry_failed=options.retry_failed,
        restart_changed=options.restart_changed,
    )
    record_command(suite.directory, _command_line(options), time.monotonic() - started, code)
    if not options.no_report and code in (0, 1):
        write_report(suite, None, _command_line(options))
    return code


def _command_line(options: argparse.Namespace) -> str:
    return f"{shown_command('reproduce')} {shlex.join(options.words)}"


def write_report(suite: Suite, out: Path | None, command: str, *, of_folders: bool = False) -> bool:
    """Write the report and print its tables; whether there was anything to report.

    `of_folders`: the runs were trained outside suites (see `run_folders`).
    """
    from megatron.paper.pages import to_text
    from megatron.paper.report import make_report

    files = make_report(suite, out, command, of_folders=of_folders)
    color = sys.stdout.isatty()
    on_the_page_only = ("_test", "cpd")
    empty, shown = [], 0
    for table in files.tables:
        if table.key.endswith(on_the_page_only):
            continue
        if any(entry.cell.present for entry in table.entries):
            print(f"\n{to_text(table, color=color)}{_legend(table, color)}")
            shown += 1
        else:
            empty.append(table.key)
    if empty:
        print(f"\nno results of the suite's settings: {', '.join(empty)} (see `status`)")
    print(f"\nReport: {files.html}")
    return shown > 0 or not empty


def _legend(table: Table, color: bool) -> str:
    """What the marks in this table mean."""
    cells = [entry.cell for entry in table.entries]
    marks = []
    mark = "bold" if color else "*"
    if any(cell.bold and not cell.words for cell in cells):
        marks.append(f"{mark}: best in its row.")
    if any(cell.bold and cell.words for cell in cells):
        marks.append(f"{mark}: p < {ALPHA:g}.")
    if any(cell.dagger for cell in cells):
        marks.append("†: KERPLE-log is significantly better.")
    if any(not cell.present and not cell.note for cell in cells):
        marks.append("—: missing.")
    return " ".join(marks)


def _submit(options: argparse.Namespace) -> int:
    from megatron.paper.slurm import submit

    given = {key: getattr(options, key) for key in ClusterOptions.model_fields if key in options}
    chosen = ClusterOptions.from_file(options.cluster, given)
    suite = _suite(options)
    places = [f"--runs={suite.runs_root}", f"--data={suite.data_root}"]
    arguments = [f"--suite={options.suite}", *places]
    arguments += [f"--only={name}" for name in options.only]
    arguments += [f"--set={item}" for item in options.sets]
    arguments += [f"--allow-kernel={name}" for name in options.allow_kernel]
    return submit(suite, chosen, arguments, options.dry_run)


def _status(options: argparse.Namespace) -> int:
    from megatron.paper.status import status_text

    suite = _suite(options)
    while True:
        text = status_text(suite)
        print("\033[2J\033[H" + text if options.watch and sys.stdout.isatty() else text, end="")
        if not options.watch:
            return 0
        sys.stdout.flush()
        time.sleep(10)


def _logs(options: argparse.Namespace) -> int:
    from megatron.paper.status import logs_text

    print(logs_text(_suite(options), options.run, options.lines), end="")
    return 0


def _released(options: argparse.Namespace) -> int:
    from megatron.paper.released import ReleasedOptions, make_released_report

    vocab, merges = options.vocab_file, options.merge_file
    if options.tokenizer == "GPT2BPETokenizer" and vocab is None:
        vocab, merges = Path("data/gpt2-vocab.json"), Path("data/gpt2-merges.txt")
    chosen = ReleasedOptions(
        text=tuple(options.text),
        tokenizer=options.tokenizer,
        vocab_file=vocab,
        merge_file=merges,
        lengths=tuple(sorted(options.lengths)),
        window=options.window,
        sequences=options.sequences,
    )
    print(f"Report: {make_released_report(options.dir, options.out, chosen)}")
    return 0


def _report(options: argparse.Namespace) -> int:
    out = Path(options.out) if options.out else None
    return 0 if write_report(_suite(options), out, _command_line(options)) else 1


def _pack(options: argparse.Namespace) -> int:
    from megatron.paper.run_archive import pack_runs

    packed = pack_runs(_suite(options), Path(options.out))
    print(f"{len(packed)} finished runs: {options.out}")
    return 0


def _worker(options: argparse.Namespace) -> int:
    from megatron.paper.execute import Launcher
    from megatron.paper.slurm import run_task

    suite = _suite(options)
    if options.stage == "report":
        write_report(suite, None, _command_line(options))
        return 0
    try:
        tasks = Path(options.tasks).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ReproduceError(f"--tasks {options.tasks}: {error}") from error
    if not 0 <= options.index < len(tasks):
        raise ReproduceError(f"--index {options.index}: the job has {len(tasks)} tasks")
    container = shlex.split(options.container)
    launcher = Launcher(True, container, options.python, options.one_gpu_per_task)
    return run_task(suite, options.stage, tasks[options.index], launcher)


_COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], str]] = {
    "plan": (_plan, "show the runs and what they cost; --write writes the configs"),
    "run": (_run, "run locally; finished runs are skipped, stopped ones continue"),
    "submit": (_submit, "submit to Slurm as array jobs"),
    "status": (_status, "a table of all runs, from their directories and squeue"),
    "logs": (_logs, "the end of a run's log; without a name, of all that failed"),
    "report": (_report, "tables and figures of what is finished"),
    "pack": (_pack, "write the results of finished runs, without checkpoints, to one file"),
    "worker": (_worker, ""),
    "released": (_released, "figures and perplexities of the official release's checkpoints"),
}
"""Command -> its function and its help text; only Slurm jobs call `worker`."""


if __name__ == "__main__":
    exit_with(lambda: run_command(main))
