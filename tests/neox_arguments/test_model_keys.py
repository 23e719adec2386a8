"""A key that names a formula accepts the names of the formulas, no more and no fewer."""

from __future__ import annotations

from typing import get_args

import pytest

from megatron.engines.dispatch import ENGINES
from megatron.model.layer_formulas import ACTIVATIONS, GATED, NORM_EPSILONS
from megatron.model.position_base import CONSTRAINTS
from megatron.neox_arguments.model_keys import GATED_ACTIVATIONS, ModelArgs

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
