"""A model's outline has the names, facts and flops of the model itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from megatron.errors import ConfigError
from megatron.model import GPTModel
from megatron.model.outline import outline_of
from megatron.model.position_base import PositionOptions, TableEmbedding, Tables, register
from megatron.mpu.parallel_layers import parameter_facts
from tests.model import small_spec

TERMS = {"forget_gate": True, "attention_sinks": True, "scalable_softmax": True}
MODELS: dict[str, dict[str, Any]] = {
    "kerple": {},
    "tied swiglu": {"activation": "swiglu", "no_weight_tying": False, "intermediate_size": 96},
    "grouped heads": {"num_kv_heads": 2, "pos_emb": "rotary"},
    "t5": {"pos_emb": "rpe", "output_layer_parallelism": "row", "no_weight_tying": True},
    "learned": {"pos_emb": "learned", "use_qk_layernorm": True},
    "per layer": {"kerple_share": "per_layer", "gpt_j_residual": True, "gpt_j_tied": True},
    "terms": TERMS,
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_facts_by_name_are_those_of_the_models_parameters(changes: dict[str, Any]) -> None:
    spec = small_spec.SPEC.replace(**changes)
    outline = outline_of(spec)
    for name, parameter in GPTModel(spec).named_parameters():
        canonical = name.removeprefix("sequential.")
        index, _, rest = canonical.partition(".")
        assert outline.facts(canonical) == parameter_facts(parameter)
        assert rest in outline.facts_in_layer(int(index))


FLOPS = {key: MODELS[key] for key in ("kerple", "tied swiglu", "grouped heads", "t5", "terms")}


@pytest.mark.parametrize("changes", FLOPS.values(), ids=FLOPS)
def test_flops_are_those_that_torch_counts(changes: dict[str, Any]) -> None:
    """The naive engine computes all pairs of tokens, of which causal attention needs half."""
    spec = small_spec.SPEC.replace(**changes, attention_engine="naive")
    length, pairs = 64, 4 * 64 * spec.hidden_size * spec.num_layers
    tokens = torch.zeros(1, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        GPTModel(spec)(tokens)
    expected = counter.get_total_flops() / length - pairs / 2
    assert outline_of(spec).flops_per_token(length) == pytest.approx(expected)


def test_a_window_bounds_the_flops_of_attention() -> None:
    spec = small_spec.SPEC.replace(sliding_window_width=15)  # and the query itself
    mean = sum(min(query + 1, 16) for query in range(256)) / 256
    whole = small_spec.SPEC.replace(sliding_window_width=None)
    saved = outline_of(whole).flops_per_token(256) - outline_of(spec).flops_per_token(256)
    assert saved == pytest.approx(4 * 32 * 2 * (256 / 2 - mean), rel=0.01)


def test_a_kernel_that_needs_numbers_while_it_is_made_has_an_outline_too() -> None:
    @register("test_needs_numbers")
    class NeedsNumbers(TableEmbedding):
        def __init__(self, options: PositionOptions) -> None:
            super().__init__(options)
            self.start = float(torch.ones(3).sum().item())  # a meta tensor has no value
            self.r = nn.Parameter(torch.full((options.num_heads,), self.start))

        def forward(self, length: int) -> Tables:
            return Tables(bias=-self.r[:, None] * self.distances(length))

    spec = small_spec.SPEC.replace(pos_emb="test_needs_numbers")
    facts = outline_of(spec).facts("1.embedding.r")
    assert (facts.split, facts.fp32, facts.rate) == (0, True, "kernel")
    made: Tensor = next(iter(NeedsNumbers(PositionOptions(spec)).parameters()))
    assert parameter_facts(made) == facts


def test_a_size_that_no_tensor_can_have_is_refused() -> None:
    spec = small_spec.SPEC.replace(hidden_size=2**40, padded_vocab_size=2**40)
    with pytest.raises(ConfigError, match=r"hidden_size = 1099511627776 .*no such model"):
        outline_of(spec).layer(0)
