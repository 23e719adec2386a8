"""kernel(): a positional embedding without a model of ours."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megatron import attention, kernel
from megatron.errors import ConfigError, PositionalEmbeddingError, UnknownPositionalEmbeddingError
from megatron.model import GPTModel, ModelSpec
from tests.checkpoints.small_models import small_args


def test_tables_are_those_of_a_model_with_the_same_seed() -> None:
    args = small_args(pos_emb="kerple_log", seed=5)
    model = GPTModel(ModelSpec.from_args(args, 128))
    alone = kernel("kerple_log", heads=args.model.num_attention_heads, seed=5)
    assert torch.equal(alone(50).bias, model.positional_tables(50).bias)


def test_it_learns_through_attention() -> None:
    log = kernel("kerple_log", heads=3)
    q, k, v = torch.randn(3, 2, 3, 40, 8)
    tables = log(40)
    attention(q, k, v, tables.bias, tables.weight).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in log.parameters())


def test_a_method_that_needs_head_dim_asks_for_it() -> None:
    with pytest.raises(PositionalEmbeddingError, match="head_dim"):
        kernel("rpe", heads=4)
    with pytest.raises(PositionalEmbeddingError, match="head_dim"):
        kernel("kerple_log", heads=4, kerple_bias_scale="pre")
    halved = kernel("kerple_log", heads=4, head_dim=4, kerple_bias_scale="pre")(9).bias
    torch.testing.assert_close(2 * halved, kernel("kerple_log", heads=4)(9).bias)
    assert kernel("rpe", heads=4, head_dim=16)(9).bias.shape == (4, 9)


def test_what_cannot_be_built_says_why() -> None:
    with pytest.raises(PositionalEmbeddingError, match="q and k"):
        kernel("rotary", heads=4, head_dim=16)
    with pytest.raises(UnknownPositionalEmbeddingError, match="kerple_log"):
        kernel("kerple_lgo", heads=4)
    with pytest.raises(ConfigError, match="kerple_constraint"):
        kernel("kerple_log", heads=4, kerple_constraint="hard")


def test_the_package_imports_no_torch_until_it_is_asked() -> None:
    script = "import sys, megatron; assert 'torch' not in sys.modules; dir(megatron); "
    script += "assert 'kernel' in dir(megatron) and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
