"""A checkpoint that goes through another form comes back bit for bit."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import kerple
from megatron.checkpoints import read_checkpoint
from megatron.checkpoints.hf.folder import write_hf
from megatron.checkpoints.store import ChecksummedFile
from megatron.checkpoints.writing import write_native, write_neox
from megatron.errors import CheckpointError
from megatron.neox_arguments.catalogue import METHODS
from tests.checkpoints.small_models import (
    assert_equal_weights,
    at_rest,
    logits_of,
    random_model,
    small_args,
    tokens,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "log": {"pos_emb": "kerple_log", "no_weight_tying": True},
    "row_head": {
        "pos_emb": "kerple_power",
        "no_weight_tying": True,
        "output_layer_parallelism": "row",
    },
    "bias_and_weight": {"pos_emb": "kerple_power_ap_ap"},
    "weight": {"pos_emb": "kerple_power__ap"},
    "t5": {"pos_emb": "rpe", "rpe_num_buckets": 4, "rpe_max_distance": 16},
    "alibi": {"pos_emb": "alibi", "norm": "rmsnorm", "no_weight_tying": True},
    "rotary": {"pos_emb": "rotary", "rotary_pct": 0.5, "gpt_j_residual": True},
    "tied_norms": {"pos_emb": "rotary", "gpt_j_residual": True, "gpt_j_tied": True},
    "learned": {"pos_emb": "learned", "norm": "scalenorm"},
    "sinusoidal": {
        "pos_emb": "sinusoidal",
        "use_bias_in_attn_linear": False,
        "kerple_share": "per_layer",  # of no kernel
    },
    "none": {"pos_emb": "none", "activation": "swiglu", "mlp_multiple_of": 4},
    "grouped": {"pos_emb": "rotary", "num_kv_heads": 2},
    "glu": {
        "pos_emb": "alibi",
        "activation": "glu",
        "mlp_multiple_of": 4,
        "norm": "non_parametric_layernorm",
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_native_split_and_merged(tmp_path: Path, variant: str) -> None:
    args = small_args(**VARIANTS[variant])
    model = random_model(args)
    original = at_rest(model, args)
    write_native(original, tmp_path / "one")
    one = read_checkpoint(tmp_path / "one")
    write_native(one, tmp_path / "two", mp=2, pp=1)
    two = read_checkpoint(tmp_path / "two")
    assert two.files.mp_size == 2
    assert two.files.layer_files
    write_native(two, tmp_path / "back", mp=1, pp=0)
    back = read_checkpoint(tmp_path / "back")
    for checkpoint in (one, two, back):
        assert checkpoint.kind == "native"
        assert_equal_weights(original, checkpoint)
        assert checkpoint.spec == original.spec
    loaded = kerple.load_pretrained(tmp_path / "two")
    assert torch.equal(logits_of(loaded, tokens()), logits_of(model, tokens()))


@pytest.mark.parametrize("mp", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_native_to_neox_and_back(tmp_path: Path, variant: str, mp: int) -> None:
    args = small_args(**VARIANTS[variant])
    original = at_rest(random_model(args), args)
    directory = write_neox(original, tmp_path, mp=mp, pp=mp - 1)
    assert not list(directory.glob("layer_01-*"))
    there = read_checkpoint(tmp_path)
    assert there.kind in ("kerple", "neox")
    assert_equal_weights(original, there)
    write_native(there, tmp_path / "back")
    back = read_checkpoint(tmp_path / "back")
    assert_equal_weights(original, back)


@pytest.mark.parametrize("pos_emb", METHODS)
def test_native_to_hugging_face_and_back(tmp_path: Path, pos_emb: str) -> None:
    args = small_args(pos_emb=pos_emb, no_weight_tying=pos_emb != "rotary")
    original = at_rest(random_model(args), args)
    write_hf(original, tmp_path)
    there = read_checkpoint(tmp_path)
    assert there.kind == "hf"
    assert_equal_weights(original, there)
    write_native(there, tmp_path / "back")
    back = read_checkpoint(tmp_path / "back")
    assert_equal_weights(original, back)
    # transformers' GPT-NeoX and GPT-2 have no word for the length trained at
    theirs = pos_emb in ("rotary", "learned")
    trained_at = back.spec.seq_length if theirs else original.spec.seq_length
    assert back.spec == original.spec.replace(seq_length=trained_at)


@pytest.mark.parametrize(
    "changes",
    [
        {"kerple_share": "per_layer", "kerple_constraint": "softplus"},
        {"forget_gate": True, "attention_sinks": True, "scalable_softmax": True},
        {
            "layer_pattern": [
                {"sliding_window_width": 3, "forget_gate": True},
                {"pos_emb": "rpe", "attention_temperature": {"floor": 4, "alpha": 0.5}},
            ],
            "kerple_constraint": "softplus",
        },
    ],
    ids=["kernels of layers", "score terms", "pattern"],
)
def test_what_only_ours_has_survives_hugging_face_and_splitting(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    args = small_args(pos_emb="kerple_log", **changes)
    original = at_rest(random_model(args), args)
    write_hf(original, tmp_path / "hf")
    write_native(read_checkpoint(tmp_path / "hf"), tmp_path / "native", mp=2)
    back = read_checkpoint(tmp_path / "native")
    assert_equal_weights(original, back)
    assert back.spec == original.spec


def test_softplus_kernels_reach_the_official_form_as_values(tmp_path: Path) -> None:
    args = small_args(pos_emb="kerple_log", kerple_constraint="softplus")
    model = random_model(args)
    write_neox(at_rest(model, args), tmp_path)
    loaded = kerple.load_pretrained(tmp_path)
    torch.testing.assert_close(loaded.positional_tables(50).bias, model.positional_tables(50).bias)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pos_emb": "kerple_log3"}, "pos_emb: kerple_log3"),
        ({"pos_emb": "kerple_log", "kerple_share": "per_layer"}, "kerple_share: per_layer"),
        ({"pos_emb": "kerple_log", "num_kv_heads": 2}, "kerple_log with num_kv_heads"),
        ({"pos_emb": "kerple_log", "kerple_bias_scale": "pre"}, "kerple_bias_scale: pre"),
        ({"pos_emb": "none", "forget_gate": True}, "has forget_gate;"),
        ({"pos_emb": "rotary", "attention_sinks": True}, "has attention_sinks;"),
        ({"pos_emb": "alibi", "scalable_softmax": True}, "has scalable_softmax;"),
        (
            {"pos_emb": "rotary", "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling",
        ),
    ],
)
def test_what_neox_lacks_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    args = small_args(**changes)
    with pytest.raises(CheckpointError, match=named):
        write_neox(at_rest(random_model(args), args), tmp_path)


def test_a_full_disk_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.save alone would say where it lost its place in the file, in a RuntimeError."""
    args = small_args(pos_emb="kerple_log")
    original = at_rest(random_model(args), args)
    monkeypatch.setattr(ChecksummedFile, "write", _full)
    with pytest.raises(OSError, match="No space left"):
        write_native(original, tmp_path)


def _full(file: ChecksummedFile, data: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_precision_can_be_chosen_and_kernels_stay_exact(tmp_path: Path) -> None:
    args = small_args(pos_emb="kerple_log")
    original = at_rest(random_model(args), args)
    write_native(original, tmp_path, dtype=torch.bfloat16)
    back = read_checkpoint(tmp_path)
    assert back.weights["0.word_embeddings.weight"].dtype == torch.bfloat16
    assert torch.equal(back.weights["1.embedding.r1"], original.weights["1.embedding.r1"])
