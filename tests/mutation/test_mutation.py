"""The mutants are other programs, of every kind, and the same for the same seed."""

from __future__ import annotations

import ast
import re

from tests.conftest import REPOSITORY
from tests.mutation.harness import INTERPRETED, modules, own_tests, sample
from tests.mutation.mutants import mutants_of

SOURCE = '''
"""Text 1 > 2."""
def f(a: int = 1, *, é: bool = False) -> int:
    """More text."""
    if a > 2 and not é:
        g(a)
        print("said")
        raise ValueError(f"no {a + 1}")
    a += 3
    return a * 4
'''


def test_mutants_of_every_kind() -> None:
    # Versions of Python differ in the parentheses that they add.
    found = {(mutant.old, re.sub("[()]", "", mutant.new)) for mutant in mutants_of(SOURCE)}
    assert found == {
        ("1", "2"),
        ("False", "True"),
        ("a > 2", "a >= 2"),
        ("2", "3"),
        ("a > 2 and not é", "a > 2 or not é"),
        ("a > 2 and not é", "not a > 2 and not é"),
        ("not é", "é"),
        ("g(a)", "pass"),
        ('raise ValueError(f"no {a + 1}")', "pass"),
        ("a += 3", "pass"),
        ("3", "4"),
        ("return a * 4", "return None"),
        ("a * 4", "a + 4"),
        ("4", "5"),
    }
    for mutant in mutants_of(SOURCE):
        assert ast.dump(ast.parse(mutant.apply(SOURCE))) != ast.dump(ast.parse(SOURCE))


def test_the_sample_is_fixed_and_every_module_has_tests() -> None:
    few, more = sample(20, 0), sample(40, 0)
    assert more[:20] == few and sample(20, 1) != few
    for name in modules():
        assert (REPOSITORY / own_tests(name)).is_file(), name
    assert len(INTERPRETED) == 3
