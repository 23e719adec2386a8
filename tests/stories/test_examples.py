"""The drop-in examples run, and do what they say."""

from __future__ import annotations

import runpy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from tests.conftest import REPOSITORY

EXAMPLES = REPOSITORY / "examples"


@pytest.mark.parametrize("name", ["kerple_in_plain_pytorch", "kerple_in_gpt2"])
def test_the_example_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "loss" in printed
    assert "nan" not in printed


def gpt2_with_kerple() -> tuple[Any, Any]:
    add_kerple = runpy.run_path(str(EXAMPLES / "kerple_in_gpt2.py"))["add_kerple"]
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation="eager",
    )  # fmt: skip
    plain = GPT2LMHeadModel(config).eval()
    changed = GPT2LMHeadModel(config).eval()
    changed.load_state_dict(plain.state_dict())
    return plain, add_kerple(changed)


def test_gpt2_with_kerple_equals_gpt2_with_the_bias_as_a_mask() -> None:
    """The reference: GPT-2's own attention, its position vectors at zero, the bias in its mask."""
    plain, changed = gpt2_with_kerple()
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain.transformer.wpe.weight.zero_()
        distance = torch.arange(16)[:, None] - torch.arange(16)
        bias: Tensor = changed.kernel(16).bias[:, distance.clamp(min=0)]
        mask = bias.masked_fill(distance < 0, torch.finfo(torch.float32).min)[None]
        expected = plain(tokens, attention_mask=mask.expand(2, -1, -1, -1)).logits
        torch.testing.assert_close(changed(tokens).logits, expected, atol=1e-5, rtol=1e-5)


def test_gpt2_with_kerple_generates_and_trains_beyond_its_positions() -> None:
    _, model = gpt2_with_kerple()
    tokens = torch.randint(64, (1, 40), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    mask = torch.ones_like(tokens)
    cached = model.generate(tokens, attention_mask=mask, **options)
    assert torch.equal(
        cached, model.generate(tokens, attention_mask=mask, use_cache=False, **options)
    )
    model(tokens, labels=tokens).loss.backward()
    assert model.kernel.r1.grad.abs().min() > 0
