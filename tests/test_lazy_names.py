"""Names of a package that are imported on first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kerple
import megatron.model
from tests.conftest import REPOSITORY


def test_a_name_is_imported_when_it_is_asked_for() -> None:
    code = (
        "import sys, megatron.neox_arguments as package\n"
        "assert 'pydantic' not in sys.modules and 'NeoXArgs' not in vars(package)\n"
        "assert package.NeoXArgs is vars(package)['NeoXArgs'] and 'pydantic' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)


@pytest.mark.parametrize("package", [kerple, megatron.model])
def test_an_unknown_name_is_an_attribute_error(package: object) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'atention'"):
        _ = package.atention  # type: ignore[attr-defined]
