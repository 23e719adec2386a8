"""`load_weights`: training starts from any checkpoint, under any parallel layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import kerple
from megatron.checkpoints import load_weights
from megatron.checkpoints.writing import write_neox
from megatron.errors import CheckpointError
from megatron.model import GPTModel, ModelSpec
from tests.checkpoints.small_models import (
    at_rest,
    logits_of,
    random_model,
    saved_model,
    small_args,
    tokens,
)


class Stage(nn.Module):
    """Some layers under the names that DeepSpeed's PipelineModule gives them."""

    def __init__(self, model: GPTModel, indices: list[int]) -> None:
        super().__init__()
        for index in indices:
            self.add_module(str(index), model.sequential[index])


def test_a_pipeline_stage_takes_only_its_layers(tmp_path: Path) -> None:
    source = saved_model(tmp_path, pos_emb="kerple_log", no_weight_tying=True)
    args = small_args(pos_emb="kerple_log", no_weight_tying=True)
    target = random_model(args, seed=9)
    spec = target.spec
    for indices in ([0, 1, 2], [3, 5, 6]):
        load_weights(Stage(target, indices), tmp_path, spec=spec)
    assert torch.equal(logits_of(target, tokens()), logits_of(source, tokens()))


def test_a_tied_stage_finds_the_embedding(tmp_path: Path) -> None:
    source = saved_model(tmp_path, pos_emb="none")
    stage = nn.Module()
    other = random_model(small_args(pos_emb="none"), seed=4)
    stage.tied_modules = nn.ModuleDict({"embedding": other.embedding})
    load_weights(stage, tmp_path, spec=source.spec)
    loaded = stage.tied_modules["embedding"].word_embeddings.weight
    assert torch.equal(loaded, source.embedding.word_embeddings.weight)


def test_one_kernel_can_start_all_layers_of_a_per_layer_model(tmp_path: Path) -> None:
    source = saved_model(tmp_path, pos_emb="kerple_log")
    target = random_model(small_args(pos_emb="kerple_log", kerple_share="per_layer"), 4)
    load_weights(target, tmp_path)
    assert torch.equal(logits_of(target, tokens()), logits_of(source, tokens()))


@pytest.mark.parametrize("constraint", ["project", "softplus"])
def test_another_constraint_keeps_the_kernel(tmp_path: Path, constraint: str) -> None:
    source = saved_model(tmp_path, pos_emb="kerple_power")
    target = random_model(small_args(pos_emb="kerple_power", kerple_constraint=constraint), 4)
    load_weights(target, tmp_path)
    expected = source.positional_tables(64).bias
    torch.testing.assert_close(target.positional_tables(64).bias, expected, rtol=2e-2, atol=2e-2)


def test_a_smaller_padding_of_the_vocabulary_needs_the_real_size(tmp_path: Path) -> None:
    saved_model(tmp_path, pos_emb="none")
    spec = ModelSpec.from_args(small_args(pos_emb="none"), 48)
    with pytest.raises(CheckpointError, match=r"\(64, 32\) in the checkpoint, \(48, 32\)") as told:
        load_weights(GPTModel(spec), tmp_path)
    assert "padded_vocab_size is 64 in the checkpoint and 48 in the config" in str(told.value)
    with pytest.raises(CheckpointError, match=r"\(64, 32\) in the checkpoint, \(48, 32\)"):
        load_weights(GPTModel(spec), tmp_path, vocab_size=60)
    load_weights(GPTModel(spec), tmp_path, vocab_size=40)


def test_another_positional_embedding_is_named(tmp_path: Path) -> None:
    saved_model(tmp_path, pos_emb="kerple_log")
    with pytest.raises(CheckpointError) as caught:
        load_weights(random_model(small_args(pos_emb="rpe")), tmp_path)
    assert "pos_emb is 'kerple_log' in the checkpoint and 'rpe' in the config" in str(caught.value)
    assert "add load_positions: fresh" in str(caught.value)


def test_fresh_positions_leave_those_of_the_module_as_they_are(tmp_path: Path) -> None:
    saved = saved_model(tmp_path, pos_emb="kerple_inkling")
    model = random_model(small_args(pos_emb="rpe"), seed=3)
    table = model.positional_tables(8).bias
    load_weights(model, tmp_path, fresh_positions=True)
    assert table is not None
    assert torch.equal(table, model.positional_tables(8).bias)  # type: ignore[arg-type]
    theirs = dict(saved.named_parameters())
    for name, parameter in model.named_parameters():
        if not name.startswith("sequential.1."):
            assert torch.equal(parameter, theirs[name]), name


def test_a_gpt_neox_checkpoint_with_rotary_takes_a_kernel(tmp_path: Path) -> None:
    args = small_args(pos_emb="rotary", rotary_pct=0.25)
    write_neox(at_rest(random_model(args), args), tmp_path)
    wanted = small_args(
        pos_emb="kerple_log", kerple_init="flat", rotary_angles=1.0, rotary_pct=0.25
    )
    model = GPTModel(ModelSpec.from_args(wanted, 64)).eval()
    with pytest.raises(CheckpointError, match="pos_emb is 'rotary' in the checkpoint and 'kerple_"):
        load_weights(model, tmp_path)
    load_weights(model, tmp_path, fresh_positions=True)
    # a bias near 0 beside the whole rotation: nearly the model as it was
    before = logits_of(kerple.load_pretrained(tmp_path), tokens())
    torch.testing.assert_close(logits_of(model, tokens()), before, rtol=0.05, atol=0.05)
