"""Names of weights in every code, and how ranks split them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import kerple
from megatron.checkpoints import load_weights, read_checkpoint
from megatron.checkpoints.sharding import Sharding, merge_shards, neox_shard
from megatron.checkpoints.writing import write_native
from megatron.errors import CheckpointError
from megatron.model import GPTModel, ModelSpec
from megatron.mpu.collectives import TensorParallel
from tests.checkpoints.small_models import (
    VOCABULARY,
    at_rest,
    logits_of,
    random_model,
    small_args,
    tokens,
)
from tests.fixture_archives import unpacked

LOG = unpacked("official_kerple_log")
POWER = unpacked("official_kerple_power_mp2")


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_every_model_parallel_rank_gets_its_share(size: int) -> None:
    checkpoint = read_checkpoint(POWER)
    spec = ModelSpec.from_args(checkpoint.args, 126)  # 128 words do not split over 3 or 6 ranks
    shards = []
    for rank in range(size):
        model = GPTModel(spec, TensorParallel(rank=rank, size=size))
        load_weights(model, POWER, vocab_size=100)
        shards.append(
            {n.removeprefix("sequential."): p.detach() for n, p in model.named_parameters()}
        )
    merged = merge_shards(shards, Sharding.of(spec, neox=False))
    for name, tensor in merged.items():
        expected = checkpoint.weights[name]
        assert torch.equal(tensor, expected[: tensor.shape[0]]), name


def test_kernels_that_pipeline_stages_trained_apart_stay_apart(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(LOG, run)
    path = run / "global_step7" / "layer_04-model_00-model_states.pt"
    layer = torch.load(path, weights_only=True)
    layer["attention.rpe.bias_p"] += 0.5
    torch.save(layer, path)
    loaded = kerple.load_pretrained(run)
    original = kerple.load_pretrained(LOG)
    assert loaded.config.model.kerple_share == "per_layer"
    first, last = (loaded.layers[i].positions for i in (0, 2))
    assert first is not None
    assert last is not None
    shared = original.positional_tables(20).bias
    assert torch.equal(first(20).bias, shared)
    assert not torch.equal(last(20).bias, shared)
    assert not torch.allclose(logits_of(loaded, tokens()), logits_of(original, tokens()))


def test_official_letters_are_not_swapped() -> None:
    """The official log kernel is -bias_p log(1 + bias_a d); the power one -bias_a d^bias_p."""
    layer = torch.load(
        LOG / "global_step7" / "layer_02-model_00-model_states.pt", weights_only=True
    )
    p, a = (layer[f"attention.rpe.bias_{x}"].reshape(-1, 1).clamp(min=0.01) for x in "pa")
    d = torch.arange(300.0)
    bias = kerple.load_pretrained(LOG).positional_tables(300).bias
    torch.testing.assert_close(bias, -p * torch.log(1 + a * d))
    shards = [
        torch.load(
            POWER / "global_step7" / f"layer_02-model_0{r}-model_states.pt", weights_only=True
        )
        for r in range(2)
    ]
    p, a = (torch.cat([s[f"attention.rpe.bias_{x}"] for s in shards]).reshape(-1, 1) for x in "pa")
    bias = kerple.load_pretrained(POWER).positional_tables(300).bias
    torch.testing.assert_close(bias, -a.clamp(min=0.01) * d ** p.clamp(0.01, 2))


def test_a_vocabulary_that_does_not_divide_is_named(tmp_path: Path) -> None:
    args = small_args(pos_emb="none", num_attention_heads=4)
    original = at_rest(random_model(args), args)
    original.weights["0.word_embeddings.weight"] = torch.zeros(VOCABULARY + 1, 32)
    with pytest.raises(CheckpointError, match=r"word_embeddings.weight \(65, 32\)"):
        write_native(original, tmp_path, mp=2)


def test_a_weight_that_a_rank_does_not_have_is_named() -> None:
    norm = {"4.norm.weight": torch.ones(8)}
    with pytest.raises(CheckpointError, match=r"together:\n  4\.norm\.weight is missing on .* 1$"):
        merge_shards([norm, {}], Sharding.of(small_args().model, neox=False))


@pytest.mark.parametrize(
    ("pos_emb", "name"), [("kerple_log", "mlp.dense_h_to_4h"), ("rotary", "mlp.linear1")]
)
def test_gated_layers_have_the_names_of_the_code_that_has_the_kernel(
    pos_emb: str, name: str
) -> None:
    args = small_args(pos_emb=pos_emb, activation="swiglu")
    shard = neox_shard(at_rest(random_model(args), args).weights, args.model, 0, 1)
    assert f"2.{name}.weight" in shard
