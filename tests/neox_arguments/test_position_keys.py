"""The keys of a positional embedding: one default each, checked without pydantic."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.neox_arguments import OWNER, NeoXArgs
from megatron.neox_arguments.position_keys import (
    PositionKeys,
    check_position_keys,
    require_positive,
)
from tests.neox_arguments.samples import TINY


def test_the_config_has_the_same_keys_and_defaults() -> None:
    given = {key: value for key, value in TINY.items() if not hasattr(PositionKeys, key)}
    args = NeoXArgs.from_dict(given)
    for field in fields(PositionKeys):
        assert getattr(getattr(args, OWNER[field.name]), field.name) == field.default, field.name


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"rpe_num_bucket": 8}, "Did you mean rpe_num_buckets?"),
        ({"kerple_constraint": "hard"}, "ste or project or softplus"),
        ({"rpe_num_buckets": 0}, "rpe_num_buckets = 0 is wrong"),
        ({"rpe_num_buckets": True}, "rpe_num_buckets = True is wrong"),
        ({"rpe_max_distance": "64"}, "it should be int"),
        ({"kerple_legacy_bf16": 1}, "it should be bool"),
        ({"seed": -1}, "seed = -1 is wrong"),
    ],
)
def test_a_wrong_key_or_value_is_named(keys: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_position_keys(**keys)
    assert complaint in str(caught.value)


def test_what_is_given_replaces_the_default() -> None:
    keys = check_position_keys(rpe_num_buckets=8, kerple_bias_scale="pre", seed=0)
    assert (keys.rpe_num_buckets, keys.kerple_bias_scale, keys.seed) == (8, "pre", 0)
    with pytest.raises(ConfigError, match=r"heads = 2\.0"):
        require_positive(heads=2.0)
