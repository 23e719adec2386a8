"""The reference page is the fields' own documentation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel

from megatron.neox_arguments import GROUPS, KNOWN_KEYS
from tests.conftest import REPOSITORY

TOOL = REPOSITORY / "tools" / "generate_config_docs.py"


def all_fields(model: type[BaseModel]) -> list[tuple[str, str | None]]:
    return [(name, field.description) for name, field in model.model_fields.items()]


def test_every_field_is_documented_and_in_one_group() -> None:
    for group in GROUPS.values():
        for name, description in all_fields(group):
            assert description and description.endswith("."), name
    assert len(KNOWN_KEYS) == sum(len(group.model_fields) for group in GROUPS.values())


def test_page_is_fresh() -> None:
    result = subprocess.run(
        [sys.executable, str(TOOL), "--check"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_check_notices_a_stale_page(tmp_path: Path) -> None:
    page = REPOSITORY / "docs" / "neox_arguments.md"
    (tmp_path / "docs").mkdir()
    (tmp_path / "tools").mkdir()
    (tmp_path / "megatron").symlink_to(REPOSITORY / "megatron")
    copied = tmp_path / "tools" / TOOL.name
    copied.write_text(TOOL.read_text())
    (tmp_path / "tools" / "_start.py").symlink_to(TOOL.parent / "_start.py")
    for text, code in ((page.read_text() + "stale", 1), (page.read_text(), 0)):
        (tmp_path / "docs" / page.name).write_text(text)
        result = subprocess.run(
            [sys.executable, str(copied), "--check"], capture_output=True, check=False
        )
        assert result.returncode == code
