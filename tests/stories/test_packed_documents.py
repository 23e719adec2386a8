"""Documents packed into one sequence are as if each stood alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.data.loader import document_starts, get_labels_and_mask
from megatron.errors import PositionalEmbeddingError
from megatron.model import GPTModel
from megatron.model.layer_list import Layer, LayerFactory
from megatron.model.loss import head_losses
from megatron.model.position_base import register
from megatron.model.rotary_and_input_positions import InputEmbedding
from tests.model import small_spec

EOD = 0
SPEC = small_spec.SPEC.replace(
    init_method_std=0.2, reset_attention_mask=True, reset_position_ids=True
)
TERMS = {"forget_gate": True, "attention_sinks": True, "scalable_softmax": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "kerple_log": {"pos_emb": "kerple_log"},
    "two tables of each layer": {"pos_emb": "kerple_bias_wht", "kerple_share": "per_layer"},
    "rotary": {"pos_emb": "rotary", "rotary_pct": 0.5},
    "learned": {"pos_emb": "learned"},
    "sinusoidal": {"pos_emb": "sinusoidal"},
    "terms": {"pos_emb": "none", **TERMS},
    "terms in a window": {"pos_emb": "kerple_log", "sliding_window_width": 4, **TERMS},
    "pattern": {
        "layer_pattern": [
            {"sliding_window_width": 4, **TERMS},
            {"pos_emb": "rpe", "attention_temperature": {"floor": 3, "alpha": 0.5}},
        ],
        "checkpoint_activations": True,
    },
    "recomputed": {"pos_emb": "kerple_log", "checkpoint_activations": True, **TERMS},
}
LENGTHS = [[5, 1, 19, 12], [30, 7]]  # of documents, their ends included; both rows are 37 long


def documents() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for lengths in LENGTHS:
        row = [torch.randint(1, 96, (length,), generator=generator) for length in lengths]
        for text in row[:-1]:
            text[-1] = EOD
        rows.append(row)
    return rows


def gradients(model: GPTModel) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("engine", ["naive", "tiled"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents_equal_each_alone_gradients_too(variant: str, engine: str) -> None:
    model = GPTModel(SPEC.replace(**VARIANTS[variant], attention_engine=engine))
    rows = documents()
    text = torch.stack([torch.cat(row) for row in rows])
    tokens, labels, mask = get_labels_and_mask(text, EOD, eod_mask_loss=True)
    losses = model((tokens, document_starts(tokens, EOD)), labels)
    (losses * mask).sum().backward()
    packed = gradients(model)
    model.zero_grad()
    alone = []
    for row in rows:
        for document in row:
            if len(document) > 1:  # else there is nothing to predict
                alone.append(model(document[None, :-1], document[None, 1:])[0])
                alone[-1].sum().backward()
    torch.testing.assert_close(losses[mask.bool()], torch.cat(alone), atol=2e-5, rtol=2e-5)
    for name, gradient in gradients(model).items():
        gap = (packed[name] - gradient).abs().max() / gradient.abs().max()
        assert float(gap) < 1e-4, name


def test_nothing_of_a_document_reaches_the_next() -> None:
    """Not even through the gates, whose sums run over the whole sequence."""
    model = GPTModel(SPEC.replace(**VARIANTS["terms"])).double()
    row = documents()[0]
    tokens = torch.cat(row)[None]
    starts = document_starts(tokens, EOD)
    embedded: list[Tensor] = []
    words = model.embedding.word_embeddings
    words.register_forward_hook(lambda *args: embedded.append(args[-1]) or args[-1].retain_grad())
    hidden = model.hidden_states((tokens, starts))
    losses = head_losses(model.head, hidden, tokens, model.head.vocab_tp, None)
    losses[0, LENGTHS[0][0] + LENGTHS[0][1] :].sum().backward()
    gradient = embedded[0].grad
    assert gradient is not None
    before = sum(LENGTHS[0][:2])
    assert float(gradient[0, :before].abs().max()) < 1e-12
    assert float(gradient[0, before:].abs().min(dim=-1).values.max()) > 1e-6


@pytest.mark.parametrize("variant", ["kerple_log", "two tables of each layer", "rotary", "learned"])
def test_a_pipeline_hands_on_where_documents_start(variant: str) -> None:
    """The list of layers as its stages run it, one after the other."""
    spec = SPEC.replace(**VARIANTS[variant], no_weight_tying=True)
    tokens = torch.stack([torch.cat(row) for row in documents()])
    inputs = (tokens, document_starts(tokens, EOD))
    state: Any = inputs
    with torch.no_grad():
        for layer in LayerFactory(spec, pipelined=True).layers():
            state = layer.make()(state) if isinstance(layer, Layer) else layer(state)
        torch.testing.assert_close(state, GPTModel(spec).hidden_states(inputs))


def test_documents_start_after_an_end() -> None:
    tokens = torch.tensor([[5, 0, 0, 7, 8, 0, 3], [0, 1, 2, 3, 4, 5, 6]])
    expected = [[0, 0, 2, 3, 3, 3, 6], [0, 1, 1, 1, 1, 1, 1]]
    assert document_starts(tokens, EOD).tolist() == expected


@pytest.mark.parametrize("pos_emb", ["rotary", "learned", "sinusoidal"])
def test_positions_may_restart_without_a_mask(pos_emb: str) -> None:
    """GPT-NeoX's reset_position_ids alone: the second document still sees the first."""
    spec = SPEC.replace(pos_emb=pos_emb, reset_attention_mask=False)
    tokens = torch.cat(documents()[1])[None]
    starts = document_starts(tokens, EOD)
    with torch.no_grad():
        plain, restarted = GPTModel(spec)(tokens), GPTModel(spec)((tokens, starts))
        apart = GPTModel(spec.replace(reset_attention_mask=True))((tokens, starts))
    first = LENGTHS[1][0]
    torch.testing.assert_close(plain[:, :first], restarted[:, :first])
    assert float((plain - restarted)[:, first:].abs().max()) > 1e-3
    assert float((apart - restarted)[:, first:].abs().max()) > 1e-3


@pytest.mark.parametrize("pos_emb", ["rotary", "xpos", "learned", "sinusoidal"])
def test_drawn_positions_reach_the_method(pos_emb: str) -> None:
    """Gaps change what a rotation and an embedding compute; a shift of all, an embedding alone."""
    spec = SPEC.replace(
        pos_emb=pos_emb, num_layers=1, reset_attention_mask=False, reset_position_ids=False,
        randomized_positions=60,
    )  # fmt: skip
    model = GPTModel(spec)
    places = torch.arange(0, 45, 3) + torch.tensor([0, 1, 2] * 5)
    tokens = torch.arange(15)[None] % 7 + 1
    starts = (torch.arange(15) - places)[None]
    with torch.no_grad():
        found = model((tokens, starts))
        consecutive, told = model(tokens), model((tokens, torch.zeros_like(tokens)))
        shifted = model((tokens, starts - 7))
    torch.testing.assert_close(consecutive, told)
    assert float((found - told)[:, 1:].abs().max()) > 1e-3
    if pos_emb in ("rotary", "xpos"):  # relative
        torch.testing.assert_close(shifted, found, rtol=1e-3, atol=1e-4)
    else:
        assert float((shifted - found).abs().max()) > 1e-3


@register("test_no_positions")
class NoPositions(InputEmbedding):
    """Knows nothing of positions that begin anew."""

    def forward(self, x_BLH: Tensor, offset: int = 0) -> Tensor:  # type: ignore[override]
        return x_BLH


def test_a_method_that_cannot_restart_says_so() -> None:
    with pytest.raises(PositionalEmbeddingError, match="reset_position_ids = true with pos_emb"):
        GPTModel(SPEC.replace(pos_emb="test_no_positions"))
    GPTModel(SPEC.replace(pos_emb="test_no_positions", reset_position_ids=False))
