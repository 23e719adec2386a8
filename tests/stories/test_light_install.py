"""`kerple` where only torch and filelock are installed, and beside NVIDIA's megatron-core."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

# Refuse every third-party package that [train] brings and the base does not.
BLOCKER = """
import sys
from importlib.abc import MetaPathFinder

class Blocker(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""
USE = """
import torch
from kerple import attention, kernel
from megatron.engines.cpp_build import load_library

log = kernel("kerple_log", heads=4)
q, k, v = torch.randn(3, 2, 4, 70, 16, requires_grad=True)
tables = log(70)
outputs, gradients = [], []
for engine in ("naive", "tiled"):
    out = attention(q, k, v, tables.bias, tables.weight, engine=engine)
    outputs.append(out)
    gradients.append(torch.autograd.grad(out.square().sum(), log.r1, retain_graph=True)[0])
torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
assert kernel("rpe", heads=4, head_dim=16)(9).bias.shape == (4, 9)
print("compiled" if load_library() is not None else "not compiled")
"""
IMPORT_NAMES = {"pyyaml": "yaml"}


def train_packages() -> set[str]:
    """Import names of what requirements.txt has and requirements-base.txt has not."""

    def names(kind: str) -> set[str]:
        lines = (REPOSITORY / "requirements" / kind).read_text(encoding="utf-8").splitlines()
        found = {re.split(r"[=<>; ]", line)[0].lower() for line in lines if line[:1].isalpha()}
        return {IMPORT_NAMES.get(name, name) for name in found}

    return names("requirements.txt") - names("requirements-base.txt")


def run(code: str, *path: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True
    )


def test_attention_and_kernel_need_torch_alone(tmp_path: Path) -> None:
    blocked = train_packages() - {"numpy", "tqdm"} | {"transformers"}  # torch imports these two
    assert {"deepspeed", "pydantic", "matplotlib", "yaml", "einops", "scipy"} <= blocked
    done = run(BLOCKER.format(blocked=blocked) + USE, REPOSITORY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "compiled"


def test_what_needs_more_says_how_to_install_it(tmp_path: Path) -> None:
    code = BLOCKER.format(blocked={"pydantic"}) + (
        "import kerple\n"
        "from megatron.errors import MissingPackageError\n"
        "try: kerple.load_pretrained\n"
        "except MissingPackageError as error: print(error)\n"
    )
    done = run(code, REPOSITORY, cwd=tmp_path)
    assert "kerple.load_pretrained: pydantic is not installed" in done.stdout, done.stderr


@pytest.mark.parametrize("ours_first", [True, False])
def test_nvidias_megatron_core_is_importable_beside_ours(tmp_path: Path, ours_first: bool) -> None:
    """megatron-core has megatron/core/__init__.py and no megatron/__init__.py."""
    core = tmp_path / "other" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("NAME = 'megatron.core'\n")
    order = [REPOSITORY, tmp_path / "other"]
    code = "import megatron.core, megatron.engines.dispatch, kerple; print(megatron.core.NAME)"
    done = run(code, *(order if ours_first else reversed(order)), cwd=tmp_path)
    assert done.stdout.strip() == "megatron.core", done.stderr
