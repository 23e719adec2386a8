"""Losses in pieces: the same numbers and gradients as all at once, in both forms of the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from megatron.model import GPTModel, loss
from megatron.model.embedding import UntiedHead
from megatron.model.loss import head_losses
from megatron.mpu.collectives import SERIAL
from megatron.training.engine import PipelineLoss
from tests.model import small_spec
from tools.benchmarks.peak_memory import _step

SPEC = small_spec.SPEC.replace(num_layers=1, no_weight_tying=True)


def gradients(value: Tensor, module: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(value, list(module.parameters()), allow_unused=False))


@pytest.mark.parametrize("chunk", [1, 7, 33, 66, 100])
def test_pieces_of_any_size_give_the_same_losses_and_gradients(chunk: int) -> None:
    torch.manual_seed(0)
    head = nn.Linear(16, 50)
    hidden = torch.randn(2, 33, 16)
    labels = torch.randint(50, (2, 33))
    whole = head_losses(head, hidden, labels, SERIAL, None)
    pieces = head_losses(head, hidden, labels, SERIAL, chunk)
    torch.testing.assert_close(pieces, whole)
    weights = torch.rand_like(whole)
    expected = gradients((whole * weights).sum(), head)
    torch.testing.assert_close(gradients((pieces * weights).sum(), head), expected)


def test_training_takes_pieces_once_the_logits_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training step never holds more logits than one piece has, in forward or backward."""
    text = torch.randint(96, (3, 1025), generator=torch.Generator().manual_seed(1))
    model = GPTModel(SPEC).train()
    rows: list[int] = []
    model.head.register_forward_hook(lambda module, args, out: rows.append(out.shape[0]))
    whole = model(text[:, :-1], text[:, 1:]).mean()
    expected = gradients(whole, model)
    assert rows == [3 * 1024]

    rows.clear()
    monkeypatch.setattr(loss, "AT_ONCE", 1024 * 96)
    pieces = model(text[:, :-1], text[:, 1:]).mean()
    torch.testing.assert_close(gradients(pieces, model), expected)
    assert rows == [1024] * 6  # three forward, and again in the backward pass


def test_a_pipelines_loss_applies_its_head_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    head, hidden = nn.Linear(16, 50), torch.randn(2, 1024, 16)
    labels, mask = torch.randint(50, (2, 1024)), (torch.rand(2, 1024) > 0.3).float()
    last_stage = PipelineLoss(50)
    last_stage.head = cast(UntiedHead, SimpleNamespace(logits=head, vocab_tp=SERIAL))
    whole = last_stage(hidden, (labels, mask))
    expected = gradients(whole, head)
    monkeypatch.setattr(loss, "AT_ONCE", 1024 * 50)
    pieces = last_stage(hidden, (labels, mask))
    torch.testing.assert_close(pieces, whole)
    torch.testing.assert_close(gradients(pieces, head), expected)


def test_a_training_step_never_holds_the_logits_of_all_tokens() -> None:
    """Counted on device meta; at once there are the logits, their gradient and more."""
    spec = {
        "padded_vocab_size": 8192,
        "num_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    logits = 64 * 64 * 8192 * 4
    at_once, in_pieces = (
        _step(spec, (64, 64), chunk, torch.get_num_threads(), "meta")["peak"]
        for chunk in (None, 256)
    )
    assert at_once > 2 * logits
    assert in_pieces < logits / 2
