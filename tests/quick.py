"""The tests of the files that differ from `main`, for `make test-quick`; without any, a selection.

megatron/PACKAGE/X.py is tested by tests/PACKAGE/test_X.py (tests/test_house.py checks that).
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.test_house import TESTED_BY

STRUCTURE = "tests/test_house.py"
SELECTION = [
    "tests/model/test_positional_embeddings.py",
    "tests/model/test_layer_list.py",
    "tests/engines/test_reference.py",
    "tests/neox_arguments/test_arguments.py",
    "tests/data/test_gpt_dataset.py",
    "tests/checkpoints/test_store.py",
    "tests/evaluation/test_results_schema.py",
    "tests/paper/test_cells.py",
    "tests/stories/test_light_install.py",
]
"""A file or two of each package, about two minutes on two cores."""


def changed_files(base: str = "main") -> list[str]:
    """Files that differ from where this branch left `base`, untracked ones included."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True)
        return done.stdout.splitlines() if done.returncode == 0 else []

    start = next(iter(git("merge-base", base, "HEAD")), "HEAD")
    return [*git("diff", "--name-only", start), *git("ls-files", "-o", "--exclude-standard")]


def tests_of(changed: Iterable[str]) -> list[str]:
    """The test files of these files; the checks of the structure always."""
    found = {STRUCTURE}
    for name in changed:
        path = Path(name)
        if path.suffix == ".md":
            found.add("tests/stories/test_readme.py::test_every_link_leads_somewhere")
        if path.suffix != ".py":
            continue
        if path.name.startswith("test_"):
            found.add(name)
        elif path.parts[0] in ("megatron", "tools"):
            inner = Path(*path.parts[path.parts[0] == "megatron" :])
            own = inner.with_name(f"test_{path.name}").as_posix()
            found.add(f"tests/{TESTED_BY.get(inner.as_posix(), own)}")
        elif path.parts[0] == "kerple":
            found.add("tests/stories/test_light_install.py")
    existing = {name for name in found if (REPOSITORY / name.partition("::")[0]).is_file()}
    return sorted(existing if existing != {STRUCTURE} else {STRUCTURE, *SELECTION})


if __name__ == "__main__":
    print("\n".join(tests_of(changed_files())))
