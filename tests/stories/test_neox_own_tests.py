"""GPT-NeoX's own tests of its arguments, run on this package: what passes there passes here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

THEIRS = ("tests/neox_args", "tests/unit/test_arguments.py")
FAIL_THERE = {
    "test_neoxargs_consume_deepy_args_without_config_dir",  # needs a GPU there; passes here
    "test_neoxargs_usage",
    "test_main_constructor",
    "test_constructor_from_ymls",
    "test_constructor_from_dict",
}
NOT_HERE = {"test_neoxargs_duplicates"}
"""It imports `NeoXArgs` from `megatron`, which is a namespace here (docs/coming_from_neox.md)."""


def test_gpt_neoxs_tests_of_its_arguments_pass(tmp_path: Path) -> None:
    checkout = os.environ.get("GPT_NEOX")
    if not checkout:
        pytest.skip("needs a GPT-NeoX checkout: set GPT_NEOX to its path")
    for folder in ("tests", "configs"):  # without its package, so that ours is imported
        shutil.copytree(Path(checkout) / folder, tmp_path / folder)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *THEIRS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    outcomes = dict(re.findall(r"::(test_\w+) (PASSED|FAILED|ERROR)", result.stdout))
    assert len(outcomes) == 21, result.stdout[-2000:]
    expected = outcomes.keys() - FAIL_THERE - NOT_HERE
    assert len(expected) == 15
    assert [name for name in sorted(expected) if outcomes[name] != "PASSED"] == []
