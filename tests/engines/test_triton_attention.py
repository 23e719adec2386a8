"""The Triton engine where there is no GPU: in the interpreter, and absent."""

from __future__ import annotations

import pytest
import torch

from megatron.engines import attention
from megatron.engines import triton_attention as engine
from megatron.engines.call import Call, checked_call
from megatron.engines.triton_attention import can_run
from megatron.engines.triton_runtime import interpreted, unavailable
from megatron.errors import EngineError
from tests.engines.triton_cases import check_in_interpreter, python


@pytest.mark.skipif(unavailable() is not None, reason="Triton is not installed")
def test_every_output_and_gradient_in_tritons_interpreter() -> None:
    check_in_interpreter("triton_interpreted.py")


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


@pytest.mark.skipif(unavailable() is not None, reason="Triton is not installed")
def test_a_batch_beyond_a_grids_axis_is_refused_with_the_fix() -> None:
    x = torch.zeros(1, 1, 1, 32).expand(65_536, -1, -1, -1)
    assert "batch 65536 and heads 1: a GPU's grid has at most 65535" in (
        can_run(Call(x, x, x)) or ""
    )


@pytest.mark.skipif(unavailable() is not None or interpreted(), reason="Triton is not installed")
def test_cpu_tensors_are_refused_with_the_fix() -> None:
    x = torch.zeros(1, 1, 4, 32)
    assert "use engine 'auto'" in (can_run(checked_call(x, x, x)) or "")
    with pytest.raises(EngineError, match="it runs on GPU, the tensors are on cpu"):
        attention(x, x, x, engine="triton")


@pytest.mark.parametrize(("capability", "runs"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_gpus_from_the_a100_on_run_it(
    capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(engine.triton_runtime, "launcher_problem", lambda: None)
    assert (engine._unsuitable_device(torch.device("cuda")) is None) == runs


def test_outside_of_torch_compile_the_kernels_are_called_directly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.zeros(1, 1, 4, 32)
    monkeypatch.setattr(engine, "pruned_attention", lambda call, visible: call.q)
    assert engine.triton_attention(checked_call(x, x, x, pruning=False)) is x
