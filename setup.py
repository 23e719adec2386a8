"""Dependencies are read from requirements/, so that there is one list of each kind.

The base is what `kerple.attention` and `kerple.kernel` import. Every extra but [site] includes
[train], the pinned packages that training, evaluation and the reports need.
"""

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
    text = (HERE / "kerple" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'__version__ = "([^"]+)"', text)
    assert found is not None
    return found.group(1)


TRAIN = requirements("requirements.txt")

setup(
    version=version(),
    install_requires=requirements("requirements-base.txt"),
    extras_require={
        "train": TRAIN,
        "site": requirements("requirements-site.txt"),
        **{
            kind: [*TRAIN, *requirements(f"requirements-{kind}.txt")]
            for kind in ("wandb", "eval", "hf", "parquet", "onnx", "serve", "dev")
        },
    },
)
