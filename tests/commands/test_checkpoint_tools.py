"""inspect_checkpoint, convert_checkpoint and its GPT-NeoX door, reshard_checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kerple
from megatron.checkpoints import read_checkpoint
from megatron.checkpoints.store import write_checksums
from megatron.commands import run
from megatron.errors import CheckpointError
from tests.checkpoints.small_models import (
    assert_equal_weights,
    logits_of,
    saved_model,
    small_args,
)
from tests.conftest import REPOSITORY
from tests.fixture_archives import unpacked

convert = partial(run, "convert_checkpoint")
inspect = partial(run, "inspect_checkpoint")
POWER = unpacked("official_kerple_power_mp2")
LOG = unpacked("official_kerple_log")


def test_any_to_any_keeps_the_official_logits(tmp_path: Path) -> None:
    steps = [
        (POWER, "a", ["--to", "hf"]),
        (tmp_path / "a", "b", ["--to", "native", "--mp", "2", "--pp", "2"]),
        (tmp_path / "b", "c", ["--to", "neox", "--mp", "1"]),
        (tmp_path / "c", "d", ["--to", "native"]),
        (tmp_path / "d", "e", ["--to", "hf"]),
    ]
    expected = np.load(POWER / "expected.npz")
    for source, name, options in steps:
        assert convert([str(source), str(tmp_path / name), *options]) == 0
        model = kerple.load_pretrained(tmp_path / name)
        logits = logits_of(model, torch.from_numpy(expected["tokens"]))
        np.testing.assert_allclose(logits.numpy(), expected["logits"], atol=1e-4, rtol=0)
        assert model.iteration == 7
        assert_equal_weights(read_checkpoint(POWER), read_checkpoint(tmp_path / name))


def test_gpt_neoxs_export_tool_is_a_door_to_ours(tmp_path: Path) -> None:
    tool = REPOSITORY / "tools" / "ckpts" / "convert_neox_to_hf.py"
    output = tmp_path / "hf"
    words = ["--input_dir", str(LOG / "global_step7"), "--output_dir", str(output)]
    words += ["--config_file", str(LOG / "global_step7" / "configs" / "model.yml")]
    words += ["--precision", "fp32", "--architecture", "llama", "--vocab-is-hf-tokenizer"]
    command = [sys.executable, str(tool), *words]
    done = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True)
    assert "--architecture llama: the export is a kerple_neox model" in done.stderr
    expected = np.load(LOG / "expected.npz")
    logits = logits_of(kerple.load_pretrained(output), torch.from_numpy(expected["tokens"]))
    np.testing.assert_allclose(logits.numpy(), expected["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("tool", "flags"),
    [
        ("convert_hf_llama_to_neox", ("--model", "--model_path", "--tp")),
        ("convert_hf_to_sequential", ("--hf-model-name", "--output-dir", "--pp")),
    ],
)
def test_gpt_neoxs_import_tools_are_doors_to_ours(
    tmp_path: Path, tool: str, flags: tuple[str, str, str]
) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    values = (tmp_path / "hf", tmp_path / "neox", 2)
    words = [str(word) for pair in zip(flags, values, strict=True) for word in pair]
    assert f'("{tool}")' in (REPOSITORY / "tools" / "ckpts" / f"{tool}.py").read_text()
    assert run(tool, words) == 0
    ours = kerple.load_pretrained(tmp_path / "neox")
    assert ours.kind == "neox"
    inputs = torch.arange(40)[None]
    torch.testing.assert_close(
        logits_of(ours, inputs), logits_of(theirs, inputs), atol=1e-4, rtol=0
    )


def test_a_failed_conversion_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert([str(POWER), str(tmp_path / "out"), "--to", "native", "--mp", "5"]) == 2
    assert "5" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_destination_is_never_overwritten_by_accident(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "precious").write_text("")
    assert convert([str(LOG), str(target), "--to", "native"]) == 2
    assert "exists" in capsys.readouterr().err
    assert convert([str(LOG), str(target), "--to", "native", "--overwrite"]) == 2
    assert "holds precious, which is not of a conversion" in capsys.readouterr().err
    (target / "precious").unlink()
    for to in ("native", "hf", "neox"):
        assert convert([str(LOG), str(target), "--to", to, "--overwrite"]) == 0
    assert (target / "global_step7" / "checksums.json").is_file()
    assert not (target / "config.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_source_is_never_deleted_for_its_conversion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    saved_model(home / "run", pos_emb="kerple_log")
    for target in (home, home / "run"):
        assert convert([str(home / "run"), str(target), "--to", "native", "--overwrite"]) == 2
        assert "which is read" in capsys.readouterr().err
    read_checkpoint(home / "run")


def test_a_flipped_bit_is_damage_to_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_model(tmp_path / "a", pos_emb="kerple_log")
    path = tmp_path / "a" / "global_step5" / "mp_rank_00_model_states.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    for command in (
        lambda: inspect([str(tmp_path / "a")]),
        lambda: convert([str(tmp_path / "a"), str(tmp_path / "b"), "--to", "hf"]),
    ):
        assert command() == 2
        assert "does not match its checksum" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        kerple.load_pretrained(tmp_path / "a")


def test_foreign_checkpoints_are_called_unverified(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"global_step7: unverified"):
        read_checkpoint(LOG)
    assert convert([str(LOG), str(tmp_path / "b"), "--to", "native"]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_checkpoint(tmp_path / "b")


def test_precision_of_the_output(tmp_path: Path) -> None:
    for to in ("native", "hf", "neox"):
        assert convert([str(LOG), str(tmp_path / to), "--to", to, "--dtype", "bf16"]) == 0
        weights = read_checkpoint(tmp_path / to).weights
        assert weights["2.attention.dense.weight"].dtype == torch.bfloat16
        assert weights["1.embedding.r1"].dtype == torch.float32


@pytest.mark.parametrize("option", [["--mp", "2"], ["--pp", "1"], ["--pp", "0"]])
def test_hugging_face_folders_are_not_split(tmp_path: Path, option: list[str]) -> None:
    with pytest.raises(SystemExit):
        convert([str(LOG), str(tmp_path / "out"), "--to", "hf", *option])


@pytest.mark.parametrize(
    ("command", "option", "reason"),
    [
        (convert, ["out", "--to", "neox", "--with-kernel-source"], "is for hf"),
        (convert, ["out", "--to", "native", "--config"], "expected at least one argument"),
        (inspect, ["--longest", "-1"], "must not be negative"),
        (inspect, ["--longest", "1000000000"], "1000000000: at most 16,777,216"),
    ],
)
def test_a_wrong_option_is_a_line_about_it(
    command: Any, option: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        command([str(LOG), *option])
    assert ending.value.code == 2
    assert reason in capsys.readouterr().err.splitlines()[-1]


def test_resharding_never_replaces_the_checkpoint_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("run", "other"):
        saved_model(tmp_path / name, pos_emb="kerple_log")
    assert run("reshard_checkpoint", [str(tmp_path / "run"), str(tmp_path / "other")]) == 2
    assert "is the checkpoint of a run; choose a new directory" in capsys.readouterr().err
    read_checkpoint(tmp_path / "other")


def test_inspection_shows_kernels_and_effective_lengths(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert inspect([str(LOG), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    facts = report["checkpoint"]
    assert (facts["kind"], facts["iteration"], facts["kernel_parameters"]) == ("kerple", 7, 12)
    assert facts["parameters"] == sum(np.prod(w["shape"]) for w in report["weights"])
    (kernel,) = report["kernels"]
    model = kerple.load_pretrained(LOG)
    bias = model.positional_tables(20481).bias
    assert bias is not None
    for head, length in enumerate(kernel["effective_lengths"]):
        beyond = (bias[head] < -2).nonzero().flatten()
        assert length == (int(beyond[0]) if len(beyond) else None)
    assert inspect([str(LOG)]) == 0
    text = capsys.readouterr().out
    _, _, table = text.partition("effective length\n")
    heads = [line.split()[0] for line in table.splitlines()[: len(kernel["effective_lengths"])]]
    assert heads == [str(head) for head in range(1, len(heads) + 1)], "counted from 1"
    assert "2.attention.query_key_value.weight" in text


def test_comparison_finds_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved_model(tmp_path / "a", pos_emb="kerple_log")
    assert convert([str(tmp_path / "a"), str(tmp_path / "b"), "--to", "native"]) == 0
    path = tmp_path / "b" / "global_step5" / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=True)
    state["module"]["sequential.2.attention.dense.bias"][3] += 0.25
    torch.save(state, path)
    write_checksums(path.parent)
    capsys.readouterr()
    assert inspect([str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    (difference,) = json.loads(capsys.readouterr().out)["differences"]
    assert difference["name"] == "2.attention.dense.bias"
    assert difference["size"] == pytest.approx(0.25)
    state["module"]["sequential.2.attention.dense.bias"][3] = float("inf")
    torch.save(state, path)
    write_checksums(path.parent)
    for given in ([str(tmp_path / "a"), str(tmp_path / "b")], [str(tmp_path / "b")]):
        assert inspect([*given, "--json"]) == 0
        json.loads(capsys.readouterr().out, parse_constant=pytest.fail)  # JSON has no Infinity
    assert inspect([str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out.rstrip().endswith("none")


@pytest.mark.parametrize(
    "changes",
    [{"pos_emb": "rotary"}, {"pos_emb": "gauss_wht1", "kerple_share": "per_layer"}],
)
def test_inspection_of_models_without_a_shared_bias(
    tmp_path: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model = saved_model(tmp_path, **changes)
    assert inspect([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert f"{model.num_parameters():,}" in text
    for layer in (1, 2):
        assert (f"kernel, of layer {layer} (from 1)\n" in text) == ("kerple_share" in changes)
    assert inspect([str(tmp_path), "--json"]) == 0
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert len(kernels) == (2 if "kerple_share" in changes else 0)


def test_a_config_can_be_given_where_none_was_saved(tmp_path: Path) -> None:
    shutil.copytree(LOG / "global_step7", tmp_path / "run")
    config = tmp_path / "model.yml"
    (tmp_path / "run" / "configs" / "model.yml").rename(config)
    target = tmp_path / "out"
    assert convert([str(tmp_path / "run"), str(target), "--to", "native"]) == 2
    given = ["--config", str(config)]
    assert convert([str(tmp_path / "run"), str(target), "--to", "native", *given]) == 0
    assert_equal_weights(read_checkpoint(LOG), read_checkpoint(target))


def test_errors_are_one_line_not_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(["nowhere"]) == 2
    assert capsys.readouterr().err == "error: nowhere: no such checkpoint directory\n"


def test_stdout_holds_the_json_and_nothing_else() -> None:
    """Without DS_ACCELERATOR, DeepSpeed searches for one and prints that it did."""
    environment = {k: v for k, v in os.environ.items() if k != "DS_ACCELERATOR"}
    done = subprocess.run(
        [sys.executable, "tools/inspect_checkpoint.py", str(LOG), "--json"],
        cwd=REPOSITORY,
        env={**environment, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert all(line.startswith("warning: ") for line in done.stderr.splitlines())  # ours
    assert json.loads(done.stdout)["checkpoint"]["pos_emb"] == "kerple_log"


def test_a_config_of_another_model_converts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_model(tmp_path / "a", pos_emb="kerple_log")
    config = tmp_path / "other.yml"
    config.write_text(small_args(pos_emb="kerple_log", activation="relu").to_yaml())
    words = [str(tmp_path / "a"), str(tmp_path / "b"), "--to", "hf", "--config", str(config)]
    assert convert(words) == 2
    told = "activation is 'gelu' in the checkpoint and 'relu' in the config"
    assert told in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
    config.write_text(small_args(pos_emb="kerple_log", attention_pruning=False).to_yaml())
    assert convert(words) == 0
    with pytest.raises(CheckpointError, match="gpt_j_residual is False in the checkpoint and True"):
        kerple.load_pretrained(
            tmp_path / "b", config=small_args(pos_emb="kerple_log", gpt_j_residual=True)
        )
