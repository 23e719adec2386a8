"""Weights that commit 655be44 saved and exported give the logits they gave there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kerple import load_pretrained
from tests.fixture_archives import unpacked

OLD = unpacked("run_655be44")


@pytest.mark.parametrize("form", ["run", "hf"])
def test_old_weights_give_the_old_logits(form: str) -> None:
    expected = np.load(OLD / "expected.npz")
    model = load_pretrained(OLD / form)
    with torch.no_grad():
        logits = model(torch.from_numpy(expected["tokens"]))
    np.testing.assert_allclose(logits[:, ::8].numpy(), expected["logits"], atol=1e-5, rtol=0)
