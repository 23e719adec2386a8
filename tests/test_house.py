"""The house as a building: a room imports only rooms above it, and no two modules share a name."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

ROOT = REPOSITORY / "megatron"
PAGES = [*sorted((REPOSITORY / "docs").glob("*.md")), *sorted(REPOSITORY.glob("[CRS]*.md"))]
DOOR = 0  # single files at the top: errors, atomic_files, machine, terminal, ...
ROOMS = [
    "neox_arguments",
    "launcher",
    "tokenizer",
    "data",
    "mpu",
    "engines",
    "model",
    "checkpoints",
    "training",
    "generation",
    "evaluation",
    "paper",
    "commands",
]


def modules() -> Iterator[Path]:
    yield from (path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py")


def floor(name: str) -> int:
    """0 at the door, then the rooms in order."""
    return ROOMS.index(name) + 1 if name in ROOMS else DOOR


def imports(path: Path) -> Iterator[str]:
    """The rooms, or files at the door, that a module imports anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == "megatron":
            names = [f"megatron.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("megatron."):
                yield name.split(".")[1]


def test_every_room_is_known() -> None:
    rooms = {path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()}
    assert rooms == set(ROOMS)


def test_no_two_modules_share_a_name() -> None:
    names = Counter(path.stem for path in modules() if path.stem != "__init__")
    assert [name for name, count in names.items() if count > 1] == []


def test_a_room_imports_only_rooms_above_it() -> None:
    wrong = [
        f"{path.relative_to(REPOSITORY)} imports {other}"
        for path in modules()
        for other in imports(path)
        if floor(other) > floor(path.relative_to(ROOT).parts[0])
    ]
    assert wrong == []


def test_the_tests_mirror_the_house_file_by_file() -> None:
    """tests/ROOM/test_X.py holds megatron/ROOM/X.py; `stories` and `fuzz` cross the rooms."""
    tests = REPOSITORY / "tests"
    lost = []
    for path in sorted(tests.rglob("test_*.py")):
        place = path.relative_to(tests)
        name = place.stem.removeprefix("test_")
        inside = [base / place.parent for base in (ROOT, REPOSITORY)]
        known = any((folder / f"{name}.py").is_file() or folder.name == name for folder in inside)
        if place.parts[0] not in ("stories", "fuzz") and not known and path.name != "test_house.py":
            lost.append(str(place))
    assert lost == []


HELD_ELSEWHERE = {
    "commands/__main__.py": "stories/test_installed.py",
    "engines/cpu_torch.py": "engines/test_engines.py",
    "engines/triton_backward.py": "engines/test_triton_attention.py",
    "engines/triton_forward.py": "engines/test_triton_attention.py",
    "training/resharding.py": "checkpoints/test_universal.py",
}
"""Modules that can be tried only through another's front, or as a process of their own."""


def test_every_module_has_its_test_file() -> None:
    """megatron/ROOM/X.py is held by tests/ROOM/test_X.py, or by a file that is named above."""
    tests, bare = REPOSITORY / "tests", []
    for path in modules():
        place = path.relative_to(ROOT)
        own = tests / place.with_name(f"test_{place.name}")
        if place.name != "__init__.py" and not own.is_file():
            bare.append(place.as_posix())
    assert bare == sorted(HELD_ELSEWHERE)
    assert [name for name in HELD_ELSEWHERE.values() if not (tests / name).is_file()] == []


def test_training_knows_nothing_of_the_paper() -> None:
    for path in (ROOT / "training").glob("*.py"):
        assert "paper" not in set(imports(path)), path


def test_the_page_opens_the_rooms_in_this_order() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    named = [room for line in headings for room in ROOMS if f"`{room}/`" in line]
    ordered = sorted(named, key=ROOMS.index)
    assert named == ordered and set(named) == set(ROOMS)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_file_that_a_page_names_exists(page: Path) -> None:
    """`store.py` is a module's name, `megatron/model/gpt.py` its path; `triton_*.py` are some."""
    folders = [path for room in ("tests", "tools") for path in (REPOSITORY / room).rglob("*.py")]
    stems = {path.name for path in [*modules(), *REPOSITORY.glob("*.py"), *folders]}
    missing = []
    for name in re.findall(r"`([\w*./-]+\.py)\b", page.read_text(encoding="utf-8")):
        found = any(fnmatch(stem, name) for stem in stems) or any(REPOSITORY.glob(name))
        if not found and not name.startswith("my_"):  # the reader's own
            missing.append(name)
    assert missing == []


def test_the_formulas_come_first_and_stand_on_their_base_alone() -> None:
    path = ROOT / "model" / "positional_embeddings.py"
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    first = next(n for n, line in enumerate(lines, 1) if "return -r1 * log1p(r2 * d)" in line)
    assert first <= 60
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    assert {node.module for node in nodes if node.level} == {"position_base"}
    assert list(imports(path)) == []


def test_the_house_does_not_sprawl() -> None:
    """What is read together belongs in one file: merge before adding beyond this."""
    assert len(list(modules())) <= 156
