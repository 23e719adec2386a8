"""The two ends at the vocabulary."""

from __future__ import annotations

import torch

from megatron.model import GPTModel
from megatron.model.embedding import TiedHead
from tests.model import small_spec


def test_a_tied_head_multiplies_by_the_embedding_and_holds_no_parameters() -> None:
    model = GPTModel(small_spec.SPEC.replace(no_weight_tying=False))
    assert isinstance(model.head, TiedHead)
    assert list(model.head.parameters()) == []
    hidden = torch.randn(2, 3, 32)
    words = model.embedding.word_embeddings.weight
    torch.testing.assert_close(model.head(hidden), hidden @ words.T)
    assert model.head.own_flops(8) == 2 * words.numel()
