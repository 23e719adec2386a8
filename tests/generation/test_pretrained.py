"""`kerple.load_pretrained` gives the numbers of the code that wrote the checkpoint."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import kerple
from megatron.checkpoints import read_checkpoint
from megatron.checkpoints.writing import cast_weights
from megatron.errors import CheckpointError, GenerationError
from tests.checkpoints.small_models import logits_of, saved_model, tokens
from tests.conftest import REPOSITORY
from tests.fixture_archives import unpacked

OFFICIAL = ("official_kerple_log", "official_kerple_power_mp2")


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_checkpoints_give_the_official_logits_beyond_their_length(name: str) -> None:
    expected = np.load(unpacked(name) / "expected.npz")
    model = kerple.load_pretrained(unpacked(name), device="cpu")
    inputs = torch.from_numpy(expected["tokens"])
    assert inputs.shape[1] > 2 * model.config.model.seq_length
    logits = logits_of(model, inputs)
    np.testing.assert_allclose(logits.numpy(), expected["logits"], atol=1e-4, rtol=0)
    logprob = logits.log_softmax(-1)[:, :-1].gather(-1, inputs[:, 1:, None])[..., 0]
    np.testing.assert_allclose(logprob.numpy(), expected["logprob"], atol=1e-4, rtol=0)
    assert model.iteration == 7
    assert model.kind == "kerple"
    assert not model.training


def test_int8_weights_are_near_the_official_logits() -> None:
    """A row of 8-bit numbers with its factor: 1/254 of its largest weight off at most."""
    expected = np.load(unpacked(OFFICIAL[0]) / "expected.npz")
    model = kerple.load_pretrained(unpacked(OFFICIAL[0]), dtype="int8")
    matrices = [p for p in model.parameters() if p.dtype == torch.int8]
    assert len(matrices) == 4 * 3 + 1 and model.num_parameters() == 97_212
    official, rows = torch.from_numpy(expected["logits"]), torch.from_numpy(expected["tokens"])
    many, few = logits_of(model, rows).float(), logits_of(model, rows[:1, :8]).float()
    for logits, whole in ((many, official), (few, official[:1, :8])):
        assert 1e-4 < (logits - whole).abs().mean() < 0.1 * whole.std()
    torch.testing.assert_close(few, many[:1, :8], atol=0.05, rtol=0.05)
    with pytest.raises(GenerationError, match="int8 weights: computed on a CPU alone"):
        kerple.load_pretrained(unpacked(OFFICIAL[0]), dtype="int8", device="meta")


def test_far_beyond_the_training_length_logits_stay_causal_and_finite() -> None:
    model = kerple.load_pretrained(unpacked(OFFICIAL[0]))
    inputs = torch.randint(128, (1, 1500), generator=torch.Generator().manual_seed(0))
    logits = logits_of(model, inputs)
    assert logits.isfinite().all()
    first = logits_of(model, inputs[:, :700])
    torch.testing.assert_close(first, logits[:, :700], atol=1e-4, rtol=0)


def test_a_step_directory_and_an_iteration_select_the_same_model(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(unpacked(OFFICIAL[0]), run)
    shutil.copytree(run / "global_step7", run / "global_step9")
    (run / "latest").write_text("global_step9")
    assert kerple.load_pretrained(run).iteration == 9
    assert kerple.load_pretrained(run, iteration=7).iteration == 7
    assert kerple.load_pretrained(run / "global_step7").iteration == 7
    with pytest.raises(CheckpointError, match=r"global_step8 does not exist .*: 7, 9"):
        kerple.load_pretrained(run, iteration=8)


def test_own_checkpoint_gives_the_same_logits(tmp_path: Path) -> None:
    model = saved_model(tmp_path, pos_emb="kerple_log")
    loaded = kerple.load_pretrained(tmp_path)
    assert loaded.kind == "native"
    assert torch.equal(logits_of(loaded, tokens()), logits_of(model, tokens()))
    bias = loaded.positional_tables(100).bias
    assert bias is not None
    assert bias.shape == (4, 100)


def test_generation_from_text_and_from_ids(tmp_path: Path) -> None:
    saved_model(tmp_path, pos_emb="kerple_log", seed=3)
    model = kerple.load_pretrained(tmp_path)
    text = model.generate("!!", max_new_tokens=5)
    ids = model.generate([model.tokenizer.tokenize("!!")], max_new_tokens=5, stop_ids=(0,))
    assert isinstance(text, str)
    assert text == model.tokenizer.detokenize(ids[0])
    assert model.generate(["!!", "??"], max_new_tokens=5)[0] == text


def test_bf16_keeps_kernel_parameters_exact(tmp_path: Path) -> None:
    model = saved_model(tmp_path, pos_emb="kerple_power")
    loaded = kerple.load_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.embedding.word_embeddings.weight.dtype == torch.bfloat16
    expected = model.positional_tables(1000).bias
    assert torch.equal(loaded.positional_tables(1000).bias, expected)
    assert logits_of(loaded, tokens()).isfinite().all()


def test_bf16_keeps_every_parameter_that_an_export_keeps_in_fp32(tmp_path: Path) -> None:
    terms = {"attention_sinks": True, "scalable_softmax": True, "kerple_share": "per_layer"}
    model = saved_model(tmp_path, pos_emb="kerple_log", **terms)
    loaded = kerple.load_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = {name for name, p in loaded.named_parameters() if p.dtype == torch.float32}
    assert {name.rpartition(".")[2] for name in kept} == {"r1", "r2", "sinks", "softmax_scale"}
    for name in kept:
        assert torch.equal(loaded.get_parameter(name), model.get_parameter(name)), name
    exported = cast_weights(read_checkpoint(tmp_path), torch.bfloat16)
    assert {n for n, t in exported.items() if t.dtype == torch.float32} == {
        name.removeprefix("sequential.") for name in kept
    }


def test_wrong_token_ids_are_named(tmp_path: Path) -> None:
    saved_model(tmp_path, pos_emb="kerple_log")
    model = kerple.load_pretrained(tmp_path)
    size = model.spec.padded_vocab_size
    for ids, message in (
        (torch.tensor([[0, size]]), f"token id {size}: this model's are 0 to {size - 1}"),
        (torch.tensor([[-1, 0]]), "token id -1: this model's are 0 to"),
        (torch.randn(1, 2), "token ids are torch.float32; give torch.long"),
    ):
        with pytest.raises(GenerationError, match=message):
            model(ids)


def test_without_its_tokenizer_a_model_still_loads(tmp_path: Path) -> None:
    saved_model(tmp_path, tokenizer_type="HFTokenizer", vocab_file="gone/tokenizer.json")
    model = kerple.load_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="gone/tokenizer.json"):
        assert model.tokenizer is None
    with pytest.raises(ValueError, match="give ids"):
        model.generate("text")


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, kerple; assert 'torch' not in sys.modules; assert kerple.__version__"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)
