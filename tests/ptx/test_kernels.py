"""Compiled kernels executed in the emulator: numbers right, every access in order.

`make test-ptx` runs every shipped kernel and operand.
"""

from __future__ import annotations

import os

import pytest

from megatron.engines.triton_runtime import interpreted, unavailable
from tests.engines.triton_cases import python
from tests.ptx.shipped import QUICK

pytestmark = pytest.mark.skipif(
    unavailable() is not None or interpreted() or os.name != "posix",
    reason="needs Triton, not in its interpreter",
)


def test_forward_backward_softmax_and_a_pruned_call_on_sm_80() -> None:
    result = python(["-m", "tests.ptx.harness", "quick"])
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    lines = result.stdout.splitlines()
    assert len(lines) == len(QUICK) and all(line.startswith("ok | ") for line in lines)
    launched = result.stdout
    attention = ("table_copies", "forward", "delta", "dkdv", "dq", "band", "steep_band")
    others = ("norms", "distances", "softmax_forward", "softmax_backward", "softmax_table")
    assert [name for name in (*attention, *others) if f" {name}x" not in launched] == []
