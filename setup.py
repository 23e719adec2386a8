"""Dependencies are read from requirements/, so that there is one list of each kind."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent


def requirements(name: str) -> list[str]:
    """The lines of a requirements file, without comments and includes."""
    lines = (HERE / "requirements" / name).read_text(encoding="utf-8").splitlines()
    plain = (line.split("#")[0].strip() for line in lines)
    return [line for line in plain if line and not line.startswith("-r")]


def version() -> str:
    text = (HERE / "megatron" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'__version__ = "([^"]+)"', text)
    assert found is not None
    return found.group(1)


setup(
    version=version(),
    install_requires=requirements("requirements.txt"),
    extras_require={
        kind: requirements(f"requirements-{kind}.txt") for kind in ("wandb", "eval", "hf", "dev")
    },
)
