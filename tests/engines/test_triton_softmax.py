"""Runs triton_interpreted_softmax.py: the fused softmax of the GPU."""

from __future__ import annotations

import pytest

from megatron.engines.triton_runtime import unavailable
from tests.engines.triton_cases import check_in_interpreter


@pytest.mark.skipif(unavailable() is not None, reason="Triton is not installed")
def test_it_holds_in_tritons_interpreter() -> None:
    check_in_interpreter("triton_interpreted_softmax.py")
