"""Checkpoints with GPT-NeoX's own logits: the same numbers here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import kerple
from tests.checkpoints.small_models import logits_of
from tests.conftest import FIXTURES

MODELS = sorted((FIXTURES / "neox_models").iterdir())


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.name)
def test_logits_are_gpt_neoxs(model: Path) -> None:
    with np.load(model / "expected.npz") as expected:
        tokens, logits = expected["tokens"], expected["logits"]
    found = logits_of(kerple.load_pretrained(model), torch.from_numpy(tokens.astype(np.int64)))
    np.testing.assert_allclose(found.numpy(), logits, rtol=0, atol=2e-5)
