"""A kernel of one's own in an exported folder, loaded by transformers without our package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.checkpoints.hf.companions import BYTE_LEVEL_MARK, _byte_level, standalone_source
from megatron.commands import run
from megatron.errors import CheckpointError
from megatron.model.position_names import positional_embedding_class
from megatron.neox_arguments import allow_kernel
from tests.checkpoints.small_models import logits_of, saved_model

MODULE = '''
"""A file with more in it than the class needs."""
import math
from dataclasses import dataclass

import torch

import kerple
from megatron.model.kernel_theory import is_cpd
from megatron.model.positional_embeddings import DistanceKernel, Positive, Uniform, register
import scipy.special

SCALE = math.sqrt(4.0)
UNUSED = kerple.__version__


def damped(d):
    return torch.log1p(SCALE * d)


@register("travelling")
class Travelling(DistanceKernel):
    learnable = {"r1": Positive(Uniform(0, 1))}

    def bias(self, d, r1):
        return -r1 * damped(d)


class Stuck(DistanceKernel):
    learnable = {"r1": Positive(Uniform(0, 1))}

    def bias(self, d, r1):
        return -r1 * torch.tensor(scipy.special.log1p(d.numpy()))


@dataclass
class Decorated(DistanceKernel):
    def bias(self, d):
        return -d


if __name__ == "__main__":
    print(is_cpd)
'''
ALONE = """
import sys
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
assert "megatron" not in sys.modules and "travelling_module" not in sys.modules
with torch.no_grad():
    torch.save(model(torch.arange(40)[None] % 64).logits, sys.argv[2])
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "travelling_module.py").write_text(MODULE, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    return "travelling_module"


def test_an_own_kernel_travels_after_a_flag(
    tmp_path: Path, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{module}:Travelling"
    allow_kernel(name)
    model = saved_model(tmp_path / "run", pos_emb=name)
    command = [str(tmp_path / "run"), str(tmp_path / "out"), "--to", "hf", "--allow-kernel", name]
    assert run("convert_checkpoint", command) == 2
    assert "--with-kernel-source" in capsys.readouterr().err
    assert run("convert_checkpoint", [*command, "--with-kernel-source"]) == 0
    subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path / "out"), str(tmp_path / "logits.pt")],
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": "", "HF_HOME": str(tmp_path / "home")},
    )
    logits = torch.load(tmp_path / "logits.pt", weights_only=True)
    expected = logits_of(model, torch.arange(40)[None] % 64)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    weights = tmp_path / "out" / "model.safetensors"
    assert (
        weights.stat().st_mode & 0o777 == (tmp_path / "out" / "config.json").stat().st_mode & 0o777
    )


def test_only_what_the_class_needs_is_taken(module: str) -> None:
    allow_kernel(f"{module}:Travelling")
    cls = positional_embedding_class(f"{module}:Travelling")
    source = standalone_source(cls, "mine")
    for word in ("SCALE", "damped", "import math", "from .positional_embeddings import"):
        assert word in source
    for word in ("UNUSED", "is_cpd", "scipy", "Stuck", "@register"):
        assert word not in source


@pytest.mark.parametrize(
    ("name", "fragment"), [("Stuck", "import scipy.special"), ("Decorated", "decorators")]
)
def test_what_cannot_travel_is_refused_by_name(module: str, name: str, fragment: str) -> None:
    allow_kernel(f"{module}:{name}")
    cls = positional_embedding_class(f"{module}:{name}")
    with pytest.raises(CheckpointError, match=fragment):
        standalone_source(cls, f"{module}:{name}")


def test_the_mark_of_a_byte_level_vocabulary_is_one_token_and_no_text() -> None:
    library = _byte_level(300)
    assert library.encode(f"h{BYTE_LEVEL_MARK}i").ids == [ord("h"), 0, ord("i")]
    assert library.decode([ord("h"), 0, 299, ord("i")]) == "hi"
