"""Model keys accept the names of formulas, no more and no fewer; what follows from several."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from megatron.engines.dispatch import ENGINES
from megatron.model.layer_formulas import ACTIVATIONS, GATED, NORM_EPSILONS
from megatron.model.position_base import CONSTRAINTS
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.model_keys import GATED_ACTIVATIONS, ModelArgs, padded_vocab_size
from tests.neox_arguments.samples import TINY

DERIVED = {"gelu_tanh"}  # no value of the key: gelu with `bias_gelu_fusion`


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("activation", {*ACTIVATIONS, *GATED} - DERIVED),
        ("norm", set(NORM_EPSILONS)),
        ("kerple_constraint", set(CONSTRAINTS)),
        ("attention_engine", set(ENGINES)),
    ],
)
def test_the_config_and_the_formulas_know_the_same_names(key: str, names: set[str]) -> None:
    assert set(get_args(ModelArgs.model_fields[key].annotation)) == names


def test_the_config_knows_which_activations_are_gated() -> None:
    assert set(GATED_ACTIVATIONS) == set(GATED)


def test_padded_vocab_size_is_neoxs() -> None:
    assert padded_vocab_size(50257, 128, 1) == 50304
    assert padded_vocab_size(50257, 128, 2) == 50432
    assert padded_vocab_size(50304, 128, 1) == 50304
    assert padded_vocab_size(512, 1, 1) == 512


@pytest.mark.parametrize(
    ("keys", "engine"),
    [
        ({}, "auto"),
        ({"scaled_upper_triang_masked_softmax_fusion": True}, "naive"),
        ({"scaled-upper-triang-masked-softmax-fusion": True}, "naive"),
        (
            {
                "scaled_upper_triang_masked_softmax_fusion": True,
                "attention_config": [[["flash"], 2]],
            },
            "auto",
        ),
        (
            {"scaled_upper_triang_masked_softmax_fusion": True, "attention_engine": "tiled"},
            "tiled",
        ),
        ({"scaled_masked_softmax_fusion": True}, "auto"),
    ],
)
def test_neox_key_for_the_fused_softmax_chooses_it(keys: dict[str, Any], engine: str) -> None:
    args = NeoXArgs.from_dict({**TINY, "num_layers": 2, **keys})
    assert args.model.engine_in_effect == engine


def test_layers_scale_their_bias_as_in_gpt_neox() -> None:
    scaled = {**TINY, "num_layers": 4, "apply_query_key_layer_scaling": True}
    assert factors(scaled) == [1, 1, 2, 3]
    assert factors({**scaled, "scale_tables_by_layer": False}) == [1, 1, 1, 1]
    mixed = [[["global", "flash"], 2]]  # flash attention never scales there
    assert factors({**scaled, "attention_config": mixed}) == [1, 1, 2, 1]


def factors(config: dict[str, Any]) -> list[int]:
    model = NeoXArgs.from_dict(config).model
    return [model.table_factor(layer) for layer in range(model.num_layers)]
