"""Outputs on the pages are those that their commands printed; a change makes them stale."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tools import document_outputs
from tools.document_outputs import Shown, fingerprint, read_record, shown_on, stale, updated

PAGE = """# A page
```console
$ echo one \\
    two
one two
$ echo three
old
```
"""
ON_PAGE = [Shown("docs/page.md", "echo one \\\n    two", "one two\n")]
ON_PAGE.append(Shown("docs/page.md", "echo three", "old\n"))
EVALUATE = "python evaluate.py runs/demo/tiny.stdlib.kerple_log.1235 --eval_tasks sliding"


def page_in(folder: Path) -> Path:
    page = folder / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(PAGE)
    return page


def test_no_output_of_the_pages_is_stale() -> None:
    shown = document_outputs.all_shown()
    assert len(shown) > 10
    assert [f"{one.page}: {one.command}" for one in stale(shown, read_record())] == []
    listed = {(page, e["command"]) for page, entries in read_record().items() for e in entries}
    assert listed == {(one.page, one.command) for one in shown}


def test_an_output_without_its_command_is_found() -> None:
    """What looks like an output (a table under dashes, an error) stands in a `console` block."""
    for page in sorted((REPOSITORY / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"^```\w*\n.*?^```$", text, re.S | re.M):
            printed = re.search(r"^(results: |valid +\d|\$ )", block, re.M)
            assert not printed or block.startswith("```console\n$ "), f"{page.name}: {block[:200]}"


def test_commands_and_outputs_of_a_page(tmp_path: Path) -> None:
    assert list(shown_on(page_in(tmp_path), tmp_path)) == ON_PAGE
    assert updated(PAGE, {"echo three": "three\n"}) == PAGE.replace("old", "three")
    assert document_outputs.run("echo three; echo four >&2") == "three\n"
    assert document_outputs.run("echo three; echo four >&2; false") == "three\nfour\n"


def test_a_notebooks_cells_are_run_in_one_space(tmp_path: Path) -> None:
    draw = "import matplotlib.pyplot as plt\nplt.plot([1, 2]);"
    cells = [
        {"cell_type": "code", "source": [line], "outputs": []}
        for line in ("x = 2", "print(x + 1)", draw)
    ]
    notebook = tmp_path / "small.ipynb"
    notebook.write_text(json.dumps({"cells": cells}))
    document_outputs.run_notebook(notebook)
    nothing, printed, drawn = (c["outputs"] for c in json.loads(notebook.read_text())["cells"])
    assert nothing == [] and printed[0]["text"] == ["3\n"]
    assert base64.b64decode(drawn[0]["data"]["image/png"]).startswith(b"\x89PNG")


def test_a_changed_command_output_or_setting_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    record = {
        "docs/page.md": [{"command": one.command, "hash": fingerprint(one)} for one in ON_PAGE]
    }
    assert stale(ON_PAGE, record) == []
    changed = [ON_PAGE[0]._replace(output="one\n"), ON_PAGE[1]._replace(command="echo four")]
    assert stale(changed, record) == changed
    runs, table = document_outputs.depends_on(EVALUATE)
    assert runs and "def table" in table
    before = fingerprint(Shown("docs/page.md", EVALUATE, ""))
    monkeypatch.setattr(document_outputs, "_tables_of_tasks", lambda: {"sliding": "another"})
    assert fingerprint(Shown("docs/page.md", EVALUATE, "")) != before
