"""From a config to a run: also from weights that are no run of ours."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

from kerple import load_pretrained
from megatron.data import IndexedDatasetWriter
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.yaml_files import read_layer
from tests.conftest import REPOSITORY
from tests.fixture_archives import unpacked
from tests.processes import run_ranks
from tests.training.cases import VOCABULARY, write_data
from tests.training.runs import losses, run

ZERO_3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


def config(directory: Path, **changes: object) -> Path:
    """The official fixture's model, trained on random tokens."""
    generator = np.random.default_rng(0)
    with IndexedDatasetWriter(directory / "random_text_document") as writer:
        for _ in range(20):
            writer.add_document(generator.integers(0, 128, 200).astype(np.uint16))
    values: dict[str, object] = {
        "num_layers": 3,
        "hidden_size": 48,
        "num_attention_heads": 6,
        "seq_length": 64,
        "pos_emb": "kerple_log",
        "no_weight_tying": True,
        "output_layer_parallelism": "row",
        "vocab_size": 128,
        "make_vocab_size_divisible_by": 64,
        "data_path": str(directory / "random_text_document"),
        "split": "80,10,10",
        "train_iters": 1,
        "train_batch_size": 2,
        "eval_iters": 1,
        "num_workers": 0,
        "log_interval": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.0}},
        "load": str(unpacked("official_kerple_log")),
        "finetune": True,
        "save": str(directory / "run"),
    }
    path = directory / "config.yml"
    path.write_text(NeoXArgs.from_dict({**values, **changes}).to_yaml())
    return path


@pytest.mark.parametrize(
    ("changes", "processes"),
    [({"pipe_parallel_size": 0}, 1), ({"pipe_parallel_size": 1}, 1), (ZERO_3, 2)],
)
def test_training_starts_from_an_official_checkpoint(
    tmp_path: Path, changes: dict[str, object], processes: int
) -> None:
    path = config(tmp_path, **changes)
    output = run_ranks(["train.py", str(path)], processes)[0]
    assert "new optimizer, step 0" in output
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    official = load_pretrained(unpacked("official_kerple_log"))
    kernels = {
        name: value.tolist()
        for module in official.positional_embeddings()
        for name, value in module.kernel_values().items()
    }
    found = next(line["kernel"] for line in lines if "kernel" in line)
    for name, values in kernels.items():
        assert found[name] == pytest.approx(values)
    # A learning rate of 0 changes nothing: what was saved is what was loaded.
    ours = load_pretrained(tmp_path / "run").state_dict()
    for name, value in official.state_dict().items():
        assert ours[name].equal(value), name


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    path = config(tmp_path, load=str(tmp_path / "nowhere"))
    (output,) = run_ranks(["train.py", str(path)], check=False)
    assert "nowhere" in output and "Traceback" not in output


def test_a_tied_head_trains_under_zero_3(tmp_path: Path) -> None:
    path = config(
        tmp_path,
        load=None,
        save=None,
        no_weight_tying=False,
        zero_optimization={"stage": 3},
        output_layer_parallelism="column",
    )
    (output,) = run_ranks(["train.py", str(path)])
    assert "step 1/1: loss" in output


def test_a_first_rate_above_the_peak_is_warned_of(tmp_path: Path) -> None:
    """GPT-NeoX's formula of a warmup of less than one step."""
    path = config(
        tmp_path, warmup=0.1, optimizer={"type": "Adam", "params": {"lr": 0.001}}, pos_emb="alibi",
        load=None, finetune=False,
    )  # fmt: skip
    (output,) = run_ranks(["train.py", str(path)])
    assert "warning: warmup = 0.1 of 1 steps is less than one step" in output
    assert "the first rate is 0.01, above lr = 0.001" in output


def test_a_hugging_face_folder_trains_on_with_its_weights_and_tokenizer(tmp_path: Path) -> None:
    folder, save = tmp_path / "llama", tmp_path / "run"
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
    rope = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"rope_theta": 500000.0, "original_max_position_embeddings": 32}
    config = LlamaConfig(
        **sizes, vocab_size=VOCABULARY, num_hidden_layers=2, num_key_value_heads=2,
        intermediate_size=48, rms_norm_eps=1e-5, tie_word_embeddings=True, rope_parameters=rope,
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).eval()
    theirs.save_pretrained(folder)
    words = {"</s>": 0, **{f"w{i}": i for i in range(1, VOCABULARY)}}
    Tokenizer(WordLevel(words, "</s>")).save(str(folder / "tokenizer.json"))
    example = read_layer(REPOSITORY / "configs" / "finetune_llama_shape.yml").values
    scaling = {**example["rope_scaling"], "factor": 2.0, "original_max_position": 32}
    small = {
        **example, **sizes, "num_layers": 2, "num_kv_heads": 2, "intermediate_size": 3 * 48,
        "rope_scaling": scaling, "seq_length": 16, "load": str(folder), "save": str(save),
        "precision": "fp32", "data_path": write_data(tmp_path), "train_iters": 2,
        "train_batch_size": 2, "eval_iters": 1, "num_workers": 0, "zero_optimization": {"stage": 0},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-9}}, "min_lr": 0.0, "log_interval": 1,
    }  # fmt: skip
    output = run(small, tmp_path / "first")
    assert f"weights from {folder} (hf); new optimizer, step 0" in output
    assert list(losses(save)) == [1, 2]
    trained = load_pretrained(save)
    assert trained.config.tokenizer.vocab_file == str(folder / "tokenizer.json")
    inputs = torch.arange(60)[None]
    expected = theirs(inputs).logits.detach()
    ours = trained(inputs)[..., :VOCABULARY].detach()
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    assert "already finished" in run(small, tmp_path / "again")
