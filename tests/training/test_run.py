"""From a config to a run: also from weights that are no run of ours."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kerple import load_pretrained
from megatron.data import IndexedDatasetWriter
from megatron.neox_arguments import NeoXArgs
from tests.fixture_archives import unpacked
from tests.processes import run_ranks

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
    assert "optimizer and step start anew" in output
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
