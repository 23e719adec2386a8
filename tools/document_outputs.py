"""Run the commands whose output the pages of docs/ show, and write what they printed.

python tools/document_outputs.py           run what is stale, in this folder (make docs-outputs)
python tools/document_outputs.py --all     run everything
python tools/document_outputs.py --check   run nothing; name the blocks that are stale and fail

A block of kind `console` holds commands, each behind `$ `, with what they print to standard output
(and to standard error if they fail). docs/outputs.yml has for each command the version that made
its output and a hash of the command, the output and what it depends on: the training settings of
the suite's runs that it names, and the code that prints the tables of the tasks that it names. The
notebook's cells are run too, and their outputs stored in it.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "outputs.yml"
NOTEBOOK = ROOT / "examples" / "kernels_by_hand.ipynb"
TOOL = "tools/document_outputs.py"
_BLOCK = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.S | re.M)
_PART = re.compile(r"^\$ (?P<command>(?:.*\\\n)*.*)\n(?P<output>(?:(?!\$ ).*\n)*)", re.M)
_RUN = re.compile(r"runs/(\w+)/([\w.]+\.\d+)")
_TASKS = re.compile(r"--eval_tasks((?: [\w:]+)+)")


class Shown(NamedTuple):
    """A command of a page and the output that the page has for it."""

    page: str
    command: str
    output: str


def shown_on(page: Path, root: Path = ROOT) -> Iterator[Shown]:
    for block in _BLOCK.findall(page.read_text(encoding="utf-8")):
        for part in _PART.finditer(block):
            yield Shown(page.relative_to(root).as_posix(), part["command"], part["output"])


def pages(root: Path = ROOT) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def depends_on(command: str) -> list[str]:
    """The hashes of the settings of the runs, and the code of the tables, that a command names."""
    from megatron.errors import ReproduceError
    from megatron.paper.suite import load_suite

    found = []
    for suite, name in sorted(set(_RUN.findall(command))):
        runs = {run.name: run for run in load_suite(suite).runs}
        if name not in runs:
            raise ReproduceError(f"{command}: the suite {suite} has no run {name}")
        found.append(runs[name].train_hash)
    tables = _tables_of_tasks()
    for names in _TASKS.findall(command):
        found += [tables[name] for name in names.split() if name in tables]
    return found


def _tables_of_tasks() -> dict[str, str]:
    """Task -> the code of its method `table`, without its comments."""
    tables = {}
    for path in sorted((ROOT / "megatron" / "evaluation").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            marks = [ast.unparse(mark) for mark in node.decorator_list]
            code = [item for item in node.body if getattr(item, "name", "") == "table"]
            names = re.findall(r"task\('(\w+)'\)", " ".join(marks))
            tables.update({name: "".join(map(ast.unparse, code)) for name in names})
    return tables


def fingerprint(shown: Shown) -> str:
    text = "\n".join([shown.command, shown.output, *depends_on(shown.command)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


Record = dict[str, list[dict[str, str]]]
"""Page -> its commands, each with the version that made the output and a hash."""


def read_record(path: Path = RECORD) -> Record:
    if not path.is_file():
        return {}
    record: Record = yaml.safe_load(path.read_text(encoding="utf-8"))
    return record


def stale(shown: Sequence[Shown], record: Record) -> list[Shown]:
    """Those whose output was not made by their command, or not with what it depends on now."""
    made = {(page, entry["hash"]) for page, entries in record.items() for entry in entries}
    return [one for one in shown if (one.page, fingerprint(one)) not in made]


def run(command: str) -> str:
    """What a command prints in this folder."""
    binaries = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        env={**environment, "COLUMNS": "110"},
        check=False,
    )
    failed = [line for line in done.stderr.splitlines() if done.returncode and line.strip()]
    lines = [*done.stdout.strip("\n").splitlines(), *failed]
    lines = [line.rstrip() for line in lines if not line.endswith(": already evaluated")]
    return "\n".join([*lines, ""]).lstrip("\n")


def updated(text: str, outputs: dict[str, str]) -> str:
    """A page with the outputs of some commands replaced."""

    def part(match: re.Match[str]) -> str:
        command = match["command"]
        if command not in outputs:
            return match[0]
        return f"$ {command}\n{outputs[command]}"

    return _BLOCK.sub(lambda block: _PART.sub(part, block[0]), text)


def write_record(shown: Sequence[Shown], old: Record, ran: set[str]) -> None:
    import kerple

    versions = {(p, e["command"]): e["version"] for p, entries in old.items() for e in entries}
    record: Record = {}
    for one in shown:
        version = versions.get((one.page, one.command), kerple.__version__)
        record.setdefault(one.page, []).append(
            {
                "command": one.command,
                "version": kerple.__version__ if one.command in ran else version,
                "hash": fingerprint(one),
            }
        )
    head = f"# Written by {TOOL}: what made each output that a page shows.\n"
    RECORD.write_text(head + yaml.safe_dump(record, sort_keys=False, width=110), encoding="utf-8")


# The notebook.


def cells_of(notebook: Path) -> Shown:
    """Its code and stored outputs, as if they were one command's."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [[cell["source"], cell["outputs"]] for cell in cells if cell["cell_type"] == "code"]
    return Shown(notebook.relative_to(ROOT).as_posix(), "every cell", json.dumps(code))


def run_notebook(notebook: Path) -> None:
    """Run the cells in one space; store what they print and draw."""
    import matplotlib as mpl

    mpl.use("Agg")
    content = json.loads(notebook.read_text(encoding="utf-8"))
    space: dict[str, Any] = {}
    number = 0
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            cell["execution_count"] = number
            cell["outputs"] = _outputs("".join(cell["source"]), space)
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    notebook.write_text(text, encoding="utf-8")


def _outputs(code: str, space: dict[str, Any]) -> list[dict[str, Any]]:
    """In the notebook's format: a stream of text, then one picture per figure."""
    import matplotlib.pyplot as plt

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "cell", "exec"), space)  # noqa: S102  our own file
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    for number in plt.get_fignums():
        picture = io.BytesIO()
        plt.figure(number).savefig(picture, format="png", dpi=70, metadata={"Software": None})
        data = {"image/png": base64.b64encode(picture.getvalue()).decode("ascii")}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    plt.close("all")
    return outputs


def all_shown() -> list[Shown]:
    return [*(one for page in pages() for one in shown_on(page)), cells_of(NOTEBOOK)]


def main(argv: Sequence[str] | None = None) -> int:
    """Check, or run what is stale."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="name stale blocks and fail")
    parser.add_argument("--all", action="store_true", help="run every command")
    options = parser.parse_args(argv)
    record = read_record()
    shown = all_shown()
    needed = shown if options.all else stale(shown, record)
    if options.check:
        for one in needed:
            print(f"{one.page}: stale output of: {one.command}", file=sys.stderr)
        return bool(needed)
    for page in sorted({one.page for one in needed}):
        if ROOT / page == NOTEBOOK:
            print(page, flush=True)
            run_notebook(NOTEBOOK)
            continue
        outputs = {}
        for command in [one.command for one in needed if one.page == page]:
            print(f"$ {command}", flush=True)
            outputs[command] = run(command)
        path = ROOT / page
        path.write_text(updated(path.read_text(encoding="utf-8"), outputs), encoding="utf-8")
    write_record(all_shown(), record, {one.command for one in needed})
    return 0


if __name__ == "__main__":
    from _start import start_main

    start_main(main)
