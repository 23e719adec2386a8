"""One declaration of a model key reaches the model, the positions and Hugging Face."""

from __future__ import annotations

import copy
import pickle

import pytest

from megatron.errors import ConfigError, PositionalEmbeddingError
from megatron.model.position_base import PositionOptions
from megatron.model.position_names import position_options
from megatron.model.spec import ModelSpec
from megatron.neox_arguments.model_keys import ModelArgs
from tests.checkpoints.small_models import small_args

CHANGES = {
    "pos_emb": "rotary",
    "rope_scaling": {"type": "yarn", "factor": 4.0},
    "activation": "swiglu",
    "attention_pruning": False,
    "seed": 99,
    "checkpoint_activations": True,
    "checkpoint_num_layers": 2,
}


def test_the_spec_holds_every_model_key_as_the_config_does() -> None:
    args = small_args(**CHANGES)
    spec = ModelSpec.from_args(args, 128)
    for key in ModelArgs.model_fields:
        assert getattr(spec, key) == getattr(args.model, key), key
    assert (spec.seed, spec.padded_vocab_size) == (99, 128)
    assert (spec.checkpoint_activations, spec.checkpoint_num_layers) == (True, 2)


def test_a_bad_value_is_named_with_its_key() -> None:
    spec = ModelSpec.from_args(small_args(), 128)
    with pytest.raises(ConfigError, match="padded_vocab_size = 0"):
        spec.replace(padded_vocab_size=0)
    with pytest.raises(ConfigError, match="seed = -1"):
        spec.replace(seed=-1)


def test_an_option_of_a_positional_embedding_is_the_models_key() -> None:
    spec = ModelSpec.from_args(small_args(rpe_num_buckets=17), 128)
    options = PositionOptions(spec, tp_rank=1, tp_size=2)
    assert options.rpe_num_buckets == 17
    assert options.num_heads == spec.num_attention_heads
    assert options.local_heads == slice(spec.num_attention_heads // 2, spec.num_attention_heads)
    for twin in (copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert twin == options


def test_a_key_that_is_not_there_is_named() -> None:
    options = position_options(heads=2)
    with pytest.raises(PositionalEmbeddingError, match="needs head_dim"):
        _ = options.head_dim
    assert not hasattr(options, "no_such_key")
    with pytest.raises(ConfigError, match="rpe_num_bucket"):
        position_options(heads=2, rpe_num_bucket=8)
