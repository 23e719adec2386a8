"""The Triton engine where there is no GPU: in the interpreter, and absent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.engines import attention
from megatron.engines.call import checked_call
from megatron.engines.triton_attention import can_run
from megatron.engines.triton_runtime import interpreted, unavailable
from megatron.errors import EngineError

ROOT = Path(__file__).resolve().parents[2]


def python(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.skipif(unavailable() is not None, reason="Triton is not installed")
def test_every_output_and_gradient_in_tritons_interpreter() -> None:
    """Runs its files in a process of their own: the interpreter is chosen at import."""
    names = ("", "_pruning", "_softmax")
    tests = [f"tests/engines/triton_interpreted{name}.py" for name in names]
    result = python(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests],
        TRITON_INTERPRET="1",
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout


def test_the_modules_import_and_explain_themselves_without_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None  # import triton now fails
import torch
from megatron.engines import triton_attention, triton_softmax
from megatron.engines.call import Call
x = torch.zeros(1, 1, 4, 32)
print(triton_attention.can_run(Call(x, x, x)))
print(triton_softmax.can_run_softmax(x))
"""
    result = python(["-c", program])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Triton is not installed") == 2


@pytest.mark.skipif(unavailable() is not None or interpreted(), reason="Triton is not installed")
def test_cpu_tensors_are_refused_with_the_fix() -> None:
    x = torch.zeros(1, 1, 4, 32)
    assert "use engine 'auto'" in (can_run(checked_call(x, x, x)) or "")
    with pytest.raises(EngineError, match="it runs on GPU, the tensors are on cpu"):
        attention(x, x, x, engine="triton")
