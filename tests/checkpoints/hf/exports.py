"""A small model of ours and the one that transformers loads from its export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron.checkpoints.hf.folder import write_hf
from megatron.model import GPTModel
from tests.checkpoints.small_models import at_rest, random_model, small_args

SCORE_TERMS = {"forget_gate": True, "attention_sinks": True, "scalable_softmax": True}


def both(folder: Path, **changes: Any) -> tuple[GPTModel, Any]:
    """Our model and the one that transformers loads from its export."""
    attention = changes.pop("attention", "sdpa")
    args = small_args(**changes)
    model = random_model(args)
    write_hf(at_rest(model, args), folder)
    exported = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
    return model, exported.eval()


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)
