"""Structure: packages import only packages above them; tests mirror modules; pages are true."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType

import pytest

from tests.conftest import REPOSITORY

ROOT = REPOSITORY / "megatron"
PAGES = [*sorted((REPOSITORY / "docs").glob("*.md")), *sorted(REPOSITORY.glob("[CRS]*.md"))]
TOP = 0  # single files directly in megatron/: errors, atomic_files, machine, terminal, ...
PACKAGES = [
    "backends",
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
    yield from sorted(ROOT.rglob("*.py"))


def layer(name: str) -> int:
    """0 for a single file, then the packages in order."""
    return PACKAGES.index(name) + 1 if name in PACKAGES else TOP


def imports(path: Path) -> Iterator[str]:
    """The packages, or single files of megatron/, that a module imports anywhere in it."""
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


def test_every_package_has_its_layer() -> None:
    packages = {path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()}
    assert packages == set(PACKAGES)


def test_megatron_is_a_namespace() -> None:
    """NVIDIA's megatron-core has the same top name: an __init__.py would hide one of the two."""
    assert not (ROOT / "__init__.py").exists()


def test_no_two_modules_share_a_name() -> None:
    names = Counter(path.stem for path in modules() if path.stem != "__init__")
    assert [name for name, count in names.items() if count > 1] == []


def test_a_package_imports_only_packages_above_it() -> None:
    wrong = [
        f"{path.relative_to(REPOSITORY)} imports {other}"
        for path in modules()
        for other in imports(path)
        if layer(other) > layer(path.relative_to(ROOT).parts[0])
    ]
    assert wrong == []


LAZY = {
    ("neox_arguments/catalogue.py", "megatron.model.position_names"),
    ("neox_arguments/layer_pattern.py", "megatron.model.position_names"),
    ("paper/execute.py", "megatron.commands"),
}
"""Names of modules in strings: the class of a user's kernel, and `python -m` of an install."""


def test_a_package_names_only_packages_above_it() -> None:
    """In strings, which importlib follows and the rule about imports does not see."""
    named = set()
    for path in modules():
        place = path.relative_to(ROOT)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            value = str(node.value) if isinstance(node, ast.Constant) else ""
            found = re.fullmatch(r"megatron\.(\w+)[\w.:]*", value)
            if found and layer(found[1]) > layer(place.parts[0]):
                named.add((place.as_posix(), value))
    assert named <= LAZY


CROSSING = ("stories", "fuzz", "ptx", "mutation")


def test_every_test_file_belongs_to_a_module() -> None:
    """tests/PACKAGE/test_X.py tests megatron/PACKAGE/X.py; those of CROSSING test several."""
    tests = REPOSITORY / "tests"
    lost = []
    for path in sorted(tests.rglob("test_*.py")):
        place = path.relative_to(tests)
        name = place.stem.removeprefix("test_")
        inside = [base / place.parent for base in (ROOT, REPOSITORY)]
        known = any((folder / f"{name}.py").is_file() or folder.name == name for folder in inside)
        exempt = place.parts[0] in CROSSING or path.name == "test_house.py"
        if not exempt and not known:
            lost.append(str(place))
    assert lost == []


TESTED_BY = {
    "backends/deepspeed_engine.py": "training/test_engine.py",
    "backends/deepspeed_processes.py": "launcher/test_planning.py",
    "backends/interface.py": "checkpoints/test_universal.py",
    "backends/optimizer_states.py": "checkpoints/test_universal.py",
    "commands/__main__.py": "stories/test_installed.py",
    "engines/cpu_torch.py": "engines/test_engines.py",
    "engines/triton_backward.py": "engines/test_triton_attention.py",
    "engines/triton_bands.py": "engines/test_triton_attention.py",
    "engines/triton_features.py": "engines/test_triton_attention.py",
    "engines/triton_forward.py": "engines/test_triton_attention.py",
    "generation/model_thread.py": "generation/test_server.py",
    "model/cache.py": "generation/test_decoding.py",
    "neox_arguments/gpt_neox_differences.py": "commands/test_dry_run.py",
    "training/resharding.py": "checkpoints/test_universal.py",
}
"""Modules that are tested through another module, or as a process of their own."""


def test_every_module_has_its_test_file() -> None:
    """megatron/PACKAGE/X.py is tested by tests/PACKAGE/test_X.py, or by the file named above."""
    tests, bare = REPOSITORY / "tests", []
    for path in modules():
        place = path.relative_to(ROOT)
        own = tests / place.with_name(f"test_{place.name}")
        if place.name != "__init__.py" and not own.is_file():
            bare.append(place.as_posix())
    assert bare == sorted(TESTED_BY)
    assert [name for name in TESTED_BY.values() if not (tests / name).is_file()] == []


def test_deepspeed_is_imported_in_its_package_alone() -> None:
    """Its runner and its import by name included; and there only in files that are named for it."""
    folders = (ROOT, *(REPOSITORY / name for name in ("kerple", "tools", "examples")))
    places = [path for folder in folders for path in folder.rglob("*.py")]
    places += REPOSITORY.glob("*.py")
    importing = {path for path in places if _imports_deepspeed(path)}
    assert importing == set((ROOT / "backends").glob("deepspeed_*.py"))


def _imports_deepspeed(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if re.fullmatch(r"deepspeed(\.\w+)+", node.value) else []
        if any(name.partition(".")[0] == "deepspeed" for name in names):
            return True
    return False


PROMISES = {
    "stories/test_score_term.py": [
        "test_a_score_term_in_four_files_is_trained_split_resumed_exported_counted"
    ],
    "paper/test_section_report.py": [
        "test_a_new_task_is_one_class_and_appears_in_the_report",
        "test_the_package_knows_no_task_by_name",
    ],
    "paper/test_run_files.py": [
        "test_runs_of_version_0_1_stay_finished",
        "test_a_key_that_trains_nothing_else_keeps_a_run_finished",
    ],
    "paper/test_result_fit.py": ["test_what_is_recorded_by_default_counts"],
    "neox_arguments/test_declared_keys.py": ["test_a_key_declares_what_it_changes"],
    "model/test_outline.py": ["test_flops_are_those_that_torch_counts"],
}
"""The tests of the promises that CONTRIBUTING.md makes, and of one owner for every fact."""


@pytest.mark.parametrize("file", PROMISES)
def test_each_promise_has_its_test_in_the_quick_suite(file: str) -> None:
    tree = ast.parse((REPOSITORY / "tests" / file).read_text(encoding="utf-8"))
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name in PROMISES[file]:
        marks = [ast.unparse(mark) for mark in found[name].decorator_list]
        assert not any("slow" in mark or "skip" in mark for mark in marks), name


def test_training_does_not_import_the_paper() -> None:
    for path in (ROOT / "training").glob("*.py"):
        assert "paper" not in set(imports(path)), path


def test_the_architecture_page_has_the_packages_in_this_order() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    named = [name for line in headings for name in PACKAGES if f"`{name}/`" in line]
    assert named == PACKAGES


def paragraphs(page: str) -> Iterator[str]:
    """Prose and list items of a Markdown page; code blocks, tables and headings are left out."""
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.S | re.M)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", prose):
        if block.strip() and not block.lstrip().startswith(("#", "|")):
            yield block.strip()


def test_the_architecture_page_has_short_paragraphs() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    long = [text for text in paragraphs(page) if len(text.split()) > 80]
    assert long == []


def test_the_readme_is_short_and_has_no_comments() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150 and "<!--" not in text


def test_the_attention_function_is_two_links_from_the_readme() -> None:
    def links(page: Path) -> list[Path]:
        found = re.findall(r"\]\(([^)#:]+?)\)", page.read_text(encoding="utf-8"))
        return [(page.parent / target).resolve() for target in found]

    second = {
        target
        for page in links(REPOSITORY / "README.md")
        if page.suffix == ".md"
        for target in links(page)
    }
    (code,) = [path for path in second if path.name == "dispatch.py"]
    assert "\ndef attention(" in code.read_text(encoding="utf-8")


def test_the_changelog_is_a_list_of_short_entries() -> None:
    """Keep a Changelog: versions, kinds of change, at most two lines an entry."""
    text = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    version = text.split("\n## ")[1]
    kinds = re.findall(r"^### (.+)$", version, flags=re.M)
    assert version.startswith(("[0.2.0]", "[Unreleased]"))
    assert set(kinds) <= {"Breaking", "Added", "Changed", "Fixed"} and len(kinds) == len(set(kinds))
    entries = re.findall(r"^- .*(?:\n  .*)*", version, flags=re.M)
    assert [entry for entry in entries if entry.count("\n") > 1] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_file_that_a_page_names_exists(page: Path) -> None:
    """`store.py` is a module's name, `megatron/model/gpt.py` its path; `triton_*.py` are some."""
    folders = [path for part in ("tests", "tools") for path in (REPOSITORY / part).rglob("*.py")]
    stems = {path.name for path in [*modules(), *REPOSITORY.glob("*.py"), *folders]}
    missing = []
    for name in re.findall(r"`([\w*./-]+\.py)\b", page.read_text(encoding="utf-8")):
        found = any(fnmatch(stem, name) for stem in stems) or any(REPOSITORY.glob(name))
        if not found and not name.startswith("my_"):  # the reader's own
            missing.append(name)
    assert missing == []


def test_the_formulas_come_first_and_import_their_base_alone() -> None:
    path = ROOT / "model" / "positional_embeddings.py"
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    first = next(n for n, line in enumerate(lines, 1) if "return -r1 * log1p(r2 * d)" in line)
    assert first <= 60
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    assert {node.module for node in nodes if node.level} == {"position_base"}
    assert list(imports(path)) == []


def test_there_are_not_too_many_modules() -> None:
    """What is read together belongs in one file: merge before adding beyond this."""
    assert len(list(modules())) <= 206


def test_a_batch_opens_at_most_20_files_on_its_way_to_the_kernel_and_back() -> None:
    """`Trainer._take_step`, `batches` and the backend's `train_step` call what is run here."""
    import torch

    from megatron.data.loader import get_labels_and_mask
    from megatron.model.gpt import GPTModel
    from megatron.model.layer_list import ModelSpec
    from megatron.training.engine import _mean_loss

    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 64}
    model = GPTModel(ModelSpec(**sizes, padded_vocab_size=128, pos_emb="kerple_log"))
    opened = {"training/trainer.py", "training/batches.py", "backends/plain_torch.py"}

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            opened.add(path.relative_to(ROOT).as_posix())

    def step() -> None:
        tokens, labels, mask = get_labels_and_mask(torch.ones(2, 65, dtype=torch.long), 0, False)
        _mean_loss(model, (tokens, (labels, mask))).backward()

    step()  # imports and builds the engine
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    assert {"model/attention.py", "engines/cpu.py"} < opened
    assert len(opened) <= 20, sorted(opened)


def test_quick_selects_the_tests_of_changed_files() -> None:
    from tests.quick import SELECTION, STRUCTURE, tests_of

    changed = ["megatron/data/loader.py", "megatron/commands/__main__.py", "tests/mpu/test_job.py"]
    expected = ["tests/data/test_loader.py", "tests/mpu/test_job.py"]
    assert tests_of(changed) == sorted([*expected, STRUCTURE, "tests/stories/test_installed.py"])
    assert tests_of([]) == sorted([STRUCTURE, *SELECTION])
    assert [name for name in SELECTION if not (REPOSITORY / name).is_file()] == []
