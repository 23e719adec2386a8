"""A rotary model gets a kernel: refused without the key, begun, faded, resumed, exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import kerple
from megatron.checkpoints import read_checkpoint
from megatron.checkpoints.hf.folder import write_hf
from tests.checkpoints.small_models import logits_of, tokens
from tests.training.cases import write_data
from tests.training.runs import finish, losses, run, run_config, start_run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def rotary(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rotary run of six steps, with its optimizer."""
    directory = tmp_path_factory.mktemp("rotary")
    run(_config(data, directory / "run", pos_emb="rotary", train_iters=6), directory)
    return directory / "run"


@pytest.fixture(scope="module")
def folder(rotary: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("hf")
    write_hf(read_checkpoint(rotary), folder)
    return folder


def _config(data: str, save: Path, **changes: Any) -> dict[str, Any]:
    keys = {"save": str(save), "load": str(save), "training_backend": "torch", **changes}
    return run_config(data, **keys, keep_last_n_checkpoints=9)


FADED: dict[str, Any] = {
    "pos_emb": "kerple_log",
    "load_positions": "fresh",
    "kerple_init": "fit",
    "kerple_share": "per_layer",
    "rotary_fade_iters": 4,
    "train_iters": 6,
}


@pytest.fixture(scope="module")
def faded(data: str, rotary: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps, over the first four of which the rotation fades."""
    directory = tmp_path_factory.mktemp("faded")
    output = run(_config(data, directory / "run", **{**FADED, "load": str(rotary)}), directory)
    assert "new optimizer, step 0" in output
    assert "kernel fitted to rotary on 8,192 tokens: error" in output
    return directory / "run"


def test_a_rotation_beside_the_kernel_is_not_lost_unasked(
    data: str, faded: Path, tmp_path: Path
) -> None:
    keys = {"pos_emb": "kerple_log", "kerple_share": "per_layer", "finetune": True}
    config = _config(data, tmp_path / "run", load=str(faded), iteration=2, **keys)
    codes, outputs = finish(start_run(config, tmp_path))
    assert codes == [2], outputs[0]
    assert "rotary_angles is 0.5 in the checkpoint and 0.0 in the config" in outputs[0]


@pytest.mark.parametrize("keys", [{}, {"finetune": True}], ids=["resumed", "finetune"])
def test_another_pos_emb_is_refused_with_the_key_that_allows_it(
    data: str, rotary: Path, tmp_path: Path, keys: dict[str, Any]
) -> None:
    config = _config(data, tmp_path / "run", load=str(rotary), pos_emb="none", **keys)
    codes, outputs = finish(start_run(config, tmp_path))
    assert codes == [2], outputs[0]
    assert "pos_emb is 'rotary' in the checkpoint and 'none' in the config" in outputs[0]
    assert "add load_positions: fresh" in outputs[0]


def test_a_hugging_face_folder_needs_the_key_too(data: str, folder: Path, tmp_path: Path) -> None:
    config = _config(data, tmp_path / "run", load=str(folder), pos_emb="none", train_iters=1)
    codes, outputs = finish(start_run(config, tmp_path))
    assert codes == [2], outputs[0]
    assert "add load_positions: fresh" in outputs[0]
    output = run({**config, "load_positions": "fresh"}, tmp_path)
    assert "(hf); new optimizer, step 0" in output


def test_a_fade_is_resumed_to_the_bit(data: str, rotary: Path, faded: Path, tmp_path: Path) -> None:
    save = tmp_path / "run"
    config = _config(data, save, **{**FADED, "load": str(rotary)})
    run({**config, "exit_interval": 2}, tmp_path)
    output = run(config, tmp_path)
    assert f"continuing it after step 2 instead of starting from load = {rotary}" in output
    assert losses(save) == losses(faded)
    first, second = (read_checkpoint(place).weights for place in (save, faded))
    assert all(torch.equal(first[name], second[name]) for name in second)


def test_a_layout_changes_neither_the_fit_nor_the_fade(
    data: str, rotary: Path, faded: Path, tmp_path: Path
) -> None:
    keys = {**FADED, "load": str(rotary), "train_iters": 2, "training_backend": "deepspeed"}
    layout = {"model_parallel_size": 2, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    run(_config(data, tmp_path / "two", **keys, **layout), tmp_path, processes=2)
    layout["model_parallel_size"] = 1
    run(_config(data, tmp_path / "one", **keys, **layout), tmp_path)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.parametrize(("step", "share"), [(2, 0.5), (6, 0.0)])
def test_a_faded_model_exports_at_any_step_and_generates_beyond_its_length(
    faded: Path, tmp_path: Path, step: int, share: float
) -> None:
    ours = kerple.load_pretrained(faded, iteration=step)
    assert ours.spec.rotary_angles == share
    checkpoint = read_checkpoint(faded, iteration=step)
    write_hf(checkpoint, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["pos_emb"], config["rotary_angles"]) == ("kerple_log", share)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True).eval()
    long = tokens(length=48)  # three times the training length
    torch.testing.assert_close(logits_of(exported, long), logits_of(ours, long))
    generated = exported.generate(long, max_new_tokens=4, do_sample=False)
    assert generated.shape == (2, 52)
    assert torch.equal(generated[:, -1], logits_of(ours, generated[:, :-1])[:, -1].argmax(-1))
    again = read_checkpoint(tmp_path)
    assert again.args.model.rotary_angles == share


def test_windowed_layers_keep_their_rotation(data: str, rotary: Path, tmp_path: Path) -> None:
    pattern = [{"pos_emb": "rotary", "sliding_window_width": 8}, {"pos_emb": "kerple_log"}]
    config = _config(
        data,
        tmp_path / "run",
        **{**FADED, "load": str(rotary), "layer_pattern": pattern, "train_iters": 2},
    )
    run(config, tmp_path)
    model = kerple.load_pretrained(tmp_path / "run")
    turns = [layer.attention.rotary for layer in model.layers]
    assert [None if turn is None else turn.share for turn in turns] == [1.0, 0.5]
    (tmp_path / "hf").mkdir()
    write_hf(read_checkpoint(tmp_path / "run"), tmp_path / "hf")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True).eval()
    torch.testing.assert_close(logits_of(exported, tokens()), logits_of(model, tokens()))
