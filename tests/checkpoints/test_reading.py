"""Bad checkpoints are refused with all that is wrong; odd ones are read as what they are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml

import kerple
from megatron.checkpoints import find_files, read_checkpoint
from megatron.checkpoints.reading import open_files
from megatron.checkpoints.safe_files import load_mapping
from megatron.checkpoints.store import write_checksums
from megatron.checkpoints.writing import write_native
from megatron.errors import CheckpointError
from tests.checkpoints.small_models import (
    at_rest,
    logits_of,
    random_model,
    saved_model,
    small_args,
    tokens,
)
from tests.fixture_archives import unpacked
from tests.fuzz.checkpoint_targets import universal

LOG = unpacked("official_kerple_log")
POWER = unpacked("official_kerple_power_mp2")


class Trap:
    """Runs a command when it is unpickled."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.mkdir, (str(self.victim),)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    saved_model(tmp_path / "run")
    victim = tmp_path / "was_here"
    path = tmp_path / "run" / "global_step5" / "mp_rank_00_model_states.pt"
    torch.save({"module": {}, "extra": Trap(victim)}, path)
    write_checksums(path.parent)  # as whoever made it would
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states.pt: refused.*mkdir"):
        kerple.load_pretrained(tmp_path / "run")
    assert not victim.exists()


def test_official_training_states_are_read_without_running_anything() -> None:
    state = load_mapping(LOG / "global_step7" / "mp_rank_00_model_states.pt")
    assert state["iteration"] == 7


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_damaged_files_are_named(tmp_path: Path, content: bytes | None) -> None:
    run = tmp_path / "run"
    shutil.copytree(LOG, run)
    path = run / "global_step7" / "layer_02-model_00-model_states.pt"
    path.write_bytes(path.read_bytes()[:3000] if content is None else content)
    with pytest.raises(CheckpointError, match=r"layer_02-model_00-model_states\.pt"):
        kerple.load_pretrained(run)


def test_weights_that_are_gone_are_named(tmp_path: Path) -> None:
    args = small_args(pos_emb="kerple_log")
    write_native(at_rest(random_model(args), args), tmp_path)
    (tmp_path / "global_step5" / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"damaged: mp_rank_00_model_states\.pt missing"):
        kerple.load_pretrained(tmp_path)


def test_missing_shards_are_all_listed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(POWER, run)
    for layer in (3, 6):
        (run / "global_step7" / f"layer_{layer:02d}-model_01-model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"incomplete, missing layer_03-.*, layer_06-"):
        kerple.load_pretrained(run)


def test_all_misfits_are_in_one_error(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(LOG, run)
    config = run / "global_step7" / "configs" / "model.yml"
    text = config.read_text().replace('"hidden-size": 48', '"hidden-size": 96')
    config.write_text(text.replace('"num-layers": 3', '"num-layers": 2'))
    with pytest.raises(CheckpointError) as caught:
        kerple.load_pretrained(run)
    message = str(caught.value)
    assert "0.word_embeddings.weight: (128, 48) in the checkpoint, (128, 96) in the" in message
    assert "2.mlp.dense_h_to_4h.bias: (192,) in the checkpoint, (384,) in the model" in message
    assert "6.final_linear.weight (128, 96): missing in the checkpoint" in message
    assert "7.final_linear.weight (128, 48): not in the model" in message


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("global_step99", "names 'global_step99', which is not there .*complete checkpoints: 7"),
        ("../elsewhere", "which is not there"),
        ("", "which is not there"),
    ],
)
def test_latest_that_points_nowhere(tmp_path: Path, content: str, complaint: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(LOG, run)
    (run / "latest").write_text(content)
    with pytest.raises(CheckpointError, match=complaint):
        kerple.load_pretrained(run)


def test_without_latest_the_newest_step_is_taken(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(LOG, run)
    (run / "latest").unlink()
    (run / "global_step7").rename(run / "global_step12")
    assert find_files(run).step_in_name == read_checkpoint(run).iteration == 12
    with pytest.raises(CheckpointError, match="nowhere: no such checkpoint directory"):
        find_files(tmp_path / "nowhere")


def test_an_iteration_that_the_path_contradicts_is_refused() -> None:
    step = LOG / "global_step7"
    assert find_files(step, 7).step_in_name == 7
    with pytest.raises(CheckpointError, match=r"iteration = 8: .*global_step7.* of step 7"):
        find_files(step, 8)


def changed(run: Path, **keys: object) -> None:
    """The official log checkpoint with other keys in its saved config."""
    shutil.copytree(LOG, run)
    config = run / "global_step7" / "configs" / "model.yml"
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), **keys}))


def test_official_sinusoidal_checkpoints_load(tmp_path: Path) -> None:
    """They hold the frequencies as a buffer of the embedding, and no kernel."""
    run = tmp_path / "run"
    changed(run, **{"pos-emb": "sinusoidal"})
    for path in sorted((run / "global_step7").glob("layer_*")):
        content = {n: t.clone() for n, t in load_mapping(path).items() if ".rpe." not in n}
        path.unlink()
        if path.name.startswith("layer_00"):
            content["position_embeddings.inv_freq"] = torch.ones(24)
        torch.save(content, path)
    model = kerple.load_pretrained(run)
    assert model.spec.pos_emb == "sinusoidal"
    assert bool(torch.isfinite(logits_of(model, tokens(20))).all())


def test_saved_keys_that_do_not_change_the_model_do_not_stop_it(tmp_path: Path) -> None:
    others = {
        "sequence_parallel": True, "use_comet": True, "comet_project": "p", "s3_path": "s3://b",
        "profile": True, "memory_profiling": True, "use_bnb_optimizer": True, "train_epochs": 2,
        "peak_theoretical_tflops": 312, "train_reward_data_paths": ["a"], "packing": True,
        "autotuning": {"enabled": True}, "train_impl": "dpo",
    }  # fmt: skip
    changed(tmp_path / "run", **others)
    with pytest.warns(UserWarning, match="are ignored"):
        assert kerple.load_pretrained(tmp_path / "run").spec.num_layers == 3
    changed(tmp_path / "other", **others, moe_num_experts=4)
    with pytest.raises(CheckpointError, match="mixture of experts"):
        kerple.load_pretrained(tmp_path / "other")


@pytest.mark.parametrize("make", ["missing", "file", "empty"])
def test_paths_that_hold_no_checkpoint(tmp_path: Path, make: str) -> None:
    path = tmp_path / "place"
    if make == "file":
        path.write_text("")
    elif make == "empty":
        path.mkdir()
    with pytest.raises(CheckpointError, match=str(path)):
        kerple.load_pretrained(path)


def test_a_checkpoint_without_its_config_needs_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(POWER, run)
    shutil.rmtree(run / "global_step7" / "configs")
    with pytest.raises(CheckpointError, match="config="):
        kerple.load_pretrained(run)
    config = read_checkpoint(POWER).args
    loaded = kerple.load_pretrained(run, config=config)
    assert torch.equal(
        logits_of(loaded, tokens()), logits_of(kerple.load_pretrained(POWER), tokens())
    )


def test_config_files_that_disagree_about_the_model(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(LOG, run)
    configs = run / "global_step7" / "configs"
    (configs / "other.yml").write_text("num-layers: 4\nseq-length-val: 512\n")
    with pytest.raises(CheckpointError, match=r"num_layers is 3 in .*model.yml and 4 in .*other"):
        kerple.load_pretrained(run)
    (configs / "other.yml").write_text("seq-length-val: 512\nsave-interval: 10\n")
    assert kerple.load_pretrained(run).config.model.seq_length_val == 512


def test_keys_about_other_machines_do_not_stop_loading(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(LOG, run)
    extra = run / "global_step7" / "configs" / "cluster.yml"
    extra.write_text("some-cluster-key: 3\n")
    with pytest.warns(UserWarning, match="some-cluster-key|some_cluster_key"):
        kerple.load_pretrained(run)
    extra.write_text("use-mup: true\nsome-cluster-key: 3\n")
    with pytest.raises(CheckpointError, match="use_mup"):
        kerple.load_pretrained(run)


def test_the_padded_vocabulary_comes_from_the_weights() -> None:
    checkpoint = read_checkpoint(LOG)
    assert checkpoint.padded_vocab_size == 128
    assert small_args().tokenizer.tokenizer_type == "CharLevelTokenizer"  # 512 ids by itself


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "configs/resolved.yml"])
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_fifo_or_a_device_in_a_checkpoint_does_not_hang(
    tmp_path: Path, name: str, kind: str
) -> None:
    saved_model(tmp_path)
    step = tmp_path / "global_step5"
    (step / "checksums.json").unlink()
    (step / name).unlink()
    if kind == "fifo":
        os.mkfifo(step / name)
    else:
        (step / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError):
        kerple.load_pretrained(tmp_path)


def test_every_weight_of_a_universal_checkpoint_is_verified(tmp_path: Path) -> None:
    """Optimizer states are not read here, and so may be damaged."""
    universal(tmp_path)
    weights = sorted((tmp_path / "global_step5" / "zero").glob("*/*.pt"))
    assert len(weights) > 50
    for file in weights:
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        if file.name == "fp32.pt":
            with pytest.raises(CheckpointError, match=r"damaged: .*fp32\.pt does not match"):
                open_files(tmp_path)
        else:
            open_files(tmp_path)
        file.write_bytes(content)


def test_layer_files_beside_universal_weights_are_not_read(tmp_path: Path) -> None:
    universal(tmp_path)
    step = tmp_path / "global_step5"
    expected = {name: weight.clone() for name, weight in read_checkpoint(tmp_path).weights.items()}
    layers = {int(name.partition(".")[0]) for name in expected}
    for layer in layers:
        own = {n.partition(".")[2]: w * 0 for n, w in expected.items() if n.startswith(f"{layer}.")}
        torch.save(own, step / f"layer_{layer:02d}-model_00-model_states.pt")
    write_checksums(step)
    found = read_checkpoint(tmp_path).weights
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
