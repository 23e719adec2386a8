"""Methods that depend on the text, against transformers' Inkling and against the forget gate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.errors import PositionalEmbeddingError
from megatron.model import GPTModel
from megatron.model.attention import SelfAttention
from megatron.model.content_positions import Inkling
from megatron.model.outline import outline_of
from megatron.model.position_base import Tables
from tests.model.position_helpers import kernel, wave
from tests.model.small_spec import SPEC

FEATURES, DISTANCES = 3, 11
KEYS = {"pos_emb": "inkling", "inkling_features": FEATURES, "inkling_distances": DISTANCES}


def layer(**changes: Any) -> SelfAttention:
    """One attention layer with numbers far from where they start, without biases."""
    keys = {"num_layers": 1, "init_method_std": 0.4, "use_bias_in_attn_linear": False}
    return GPTModel(SPEC.replace(**{**KEYS, **keys, **changes})).layers[0].attention


class _Same(nn.Module):
    """In the place of Inkling's short convolutions and norms, which ours does not have."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return x


def inkling_layer(attention: SelfAttention, window: int | None) -> nn.Module:
    """transformers' layer with the weights of ours."""
    inkling = pytest.importorskip("transformers.models.inkling.modeling_inkling")
    kind = "hybrid" if window is None else "hybrid_sliding"
    config = inkling.InklingTextConfig(
        hidden_size=SPEC.hidden_size, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
        swa_num_attention_heads=4, swa_num_key_value_heads=4, swa_head_dim=8, d_rel=FEATURES,
        rel_extent=DISTANCES, sliding_window_size=window or 8, layer_types=[kind],
        mlp_layer_types=["dense"], num_hidden_layers=1, attn_implementation="eager",
    )  # fmt: skip
    theirs = inkling.InklingAttention(config, 0)
    theirs.k_sconv = theirs.v_sconv = theirs.q_norm = theirs.k_norm = _Same()
    theirs.scaling = 8**-0.5
    qkv = attention.query_key_value.weight.detach().view(4, 3, 8, SPEC.hidden_size).unbind(1)
    with torch.no_grad():
        for name, part in zip(("q_proj", "k_proj", "v_proj"), qkv, strict=True):
            getattr(theirs, name).weight.copy_(part.flatten(0, 1))
        theirs.o_proj.weight.copy_(attention.dense.weight)
        terms = attention.terms
        assert isinstance(terms, Inkling)
        theirs.r_proj.weight.copy_(terms.weight)
        theirs.rel_logits_proj.proj.copy_(terms.distance_features)
    return theirs


@pytest.mark.parametrize("window", [None, 7])
def test_a_layer_is_that_of_transformers(window: int | None) -> None:
    attention = layer(sliding_window_width=None if window is None else window - 1)
    theirs = inkling_layer(attention, window)
    x = torch.randn(2, 40, SPEC.hidden_size, requires_grad=True)
    distance = torch.arange(40)[:, None] - torch.arange(40)
    hidden = (distance < 0) | (distance >= (window or 40))
    mask = torch.zeros(40, 40).masked_fill(hidden, -torch.inf)
    expected, _ = theirs(x, mask)
    found = attention(x, Tables())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    grad = torch.randn_like(found)
    terms = attention.terms
    assert isinstance(terms, Inkling)
    wanted = [x, theirs.r_proj.weight, theirs.rel_logits_proj.proj]
    gradients = torch.autograd.grad(expected, wanted, grad)
    ours = torch.autograd.grad(found, [x, terms.weight, terms.distance_features], grad)
    for actual, other in zip(ours, gradients, strict=True):
        torch.testing.assert_close(actual, other, atol=1e-4, rtol=1e-4)


def test_cable_is_a_forget_gate_with_the_other_sign() -> None:
    cable = layer(pos_emb="cable")
    gated = layer(pos_emb="none", forget_gate=True)
    assert gated.forget_gate is not None and cable.terms is not None
    state = cable.state_dict()
    with torch.no_grad():
        cable.terms.bias.copy_(torch.tensor([-1.0, 0.0, 0.5, 2.0]))
        gated.forget_gate.weight.copy_(-cable.terms.weight)
        gated.forget_gate.bias.copy_(-cable.terms.bias)
        for name in ("query_key_value", "dense"):
            getattr(gated, name).weight.copy_(state[f"{name}.weight"])
        x = torch.randn(2, 30, SPEC.hidden_size)
        torch.testing.assert_close(cable(x, Tables()), gated(x, Tables()), rtol=1e-4, atol=1e-5)


def small_layer(pos_emb: str, *, bias: bool) -> SelfAttention:
    """Two heads of 4, in float64, and all scores at once."""
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "attention_engine": "naive"}
    return layer(pos_emb=pos_emb, use_bias_in_attn_linear=bias, **sizes).double()


def q_k_v_by_head(rows: Tensor) -> Tensor:
    """Of a projection's rows, which others order as all q, all k, all v."""
    return rows.unflatten(0, (3, 2, 4)).transpose(0, 1).flatten(0, 2)


def close_to(found: Tensor, recorded: str) -> None:
    expected = torch.tensor([float(word) for word in recorded.split()], dtype=torch.float64)
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=1e-5)


def test_cable_is_the_authors_layer() -> None:
    """axiomlab/Cable at 8bc6b83 in float64: outputs at positions 1 and 5, gradients of w and b.

    Their q.k is not divided by sqrt(head_dim), so that our q is twice theirs.
    """
    attention = small_layer("cable", bias=True)
    assert attention.terms is not None
    values = {
        "query_key_value.weight": wave(24, 8),
        "query_key_value.bias": wave(24, start=1),
        "terms.weight": wave(2, 8, start=2),
        "terms.bias": wave(2, start=3),
        "dense.weight": wave(8, 8, start=4),
        "dense.bias": wave(8, start=5),
    }
    with torch.no_grad():
        for name, value in values.items():
            theirs = 0.6 * value
            if name.startswith("query"):
                theirs = q_k_v_by_head(torch.cat((2 * theirs[:8], theirs[8:])))
            attention.get_parameter(name).copy_(theirs)
    found = attention(wave(1, 6, 8, start=9), Tables())
    close_to(found[0, 1], "-1.44092 0.85039 2.76708 3.44021 2.55976 0.51747 -1.76738 -3.26177")
    close_to(found[0, 5], "-6.08883 -7.73658 -5.90454 -1.42364 3.68691 7.12967 7.36187 4.28670")
    loss = (found * wave(1, 6, 8, start=1)).sum()
    w, b = torch.autograd.grad(loss, [attention.terms.weight, attention.terms.bias])
    close_to(w[0], "-2.11706 -1.43623 -0.07991 1.31398 2.08989 1.88289 0.79034 -0.67392")
    close_to(b, "-2.45205 -2.00160")


def test_bam_with_ssmax_is_the_authors_layer() -> None:
    """ArthurSBianchessi/BAM at 5a6579d in float64: outputs at positions 1 and 5, gradients.

    The first query has one key; their factor there is log 1.
    """
    attention = small_layer("bam_ssmax", bias=False)
    prior = kernel("bam_ssmax", heads=2, kerple_constraint="ste").double()
    prior.set_kernel_values_({"r1": torch.tensor([-1.0, 0.5]), "r2": torch.tensor([0.6, 1.7])})
    assert attention.terms is not None
    with torch.no_grad():
        parts = [0.6 * wave(8, 8, start=i) for i in range(4)]
        attention.query_key_value.weight.copy_(q_k_v_by_head(torch.cat(parts[:3])))
        attention.dense.weight.copy_(parts[3])
        attention.terms.row_scale.copy_(torch.tensor([0.7, 1.4]))
    tables = prior(6)
    assert tables.bias is not None
    close_to(tables.bias[0].flip(0), "-0.96625 -0.84517 -0.71118 -0.55760 -0.36788 -0.00037")
    close_to(tables.bias[1].flip(0), "-25.43301 -17.40408 -10.67225 -5.35676 -1.64875 0")
    found = attention(wave(1, 6, 8, start=9), tables)
    close_to(found[0, 1], "2.72253 4.23250 3.84264 1.72794 -1.16238 -3.53094 -4.31457 -3.16153")
    close_to(found[0, 5], "-5.53438 -4.28000 -1.10445 2.56684 5.08596 5.32216 3.16940 -0.40599")
    loss = (found * wave(1, 6, 8, start=1)).sum()
    learned = [*prior.parameters(), attention.terms.row_scale]
    scale, shape, sharpness = torch.autograd.grad(loss, learned)
    close_to(scale, "1.54976 1.29736")
    close_to(shape, "2.43415 0.07703")
    close_to(sharpness, "2.34973 -0.10781")


def test_facts_sizes_and_limits() -> None:
    window = SPEC.replace(**KEYS, sliding_window_width=4)
    outline = outline_of(window)
    facts = outline.facts_in_layer(2)
    assert facts["attention.terms.weight"].split == 0
    table = facts["attention.terms.distance_features"]
    assert table.split is None and table.fp32 and table.rate == "kernel" and table.decay is False
    built = outline.layer(2)
    assert built is not None
    assert built.get_parameter("attention.terms.distance_features").shape == (FEATURES, 5)
    longer = outline_of(SPEC.replace(**KEYS)).flops_per_token(64)
    plain = outline_of(SPEC.replace(pos_emb="none")).flops_per_token(64)
    distances = DISTANCES - DISTANCES**2 / 128
    assert longer - plain == 2 * 2 * 4 * FEATURES * (SPEC.hidden_size + distances)
    with pytest.raises(PositionalEmbeddingError, match="inkling_features: 65"):
        GPTModel(SPEC.replace(**{**KEYS, "inkling_features": 65}))


def test_layers_start_from_their_own_numbers() -> None:
    first, second = GPTModel(SPEC.replace(**KEYS)).layers
    a, b = first.attention.terms, second.attention.terms
    assert isinstance(a, Inkling) and isinstance(b, Inkling)
    assert not torch.equal(a.weight, b.weight)
    assert float(a.weight.detach().std()) == pytest.approx(0.02, rel=0.2)
