"""GPT-NeoX's own models: the same logits, first weights and decay here, or refused by name.

`neox_random` holds models drawn at random over GPT-NeoX's model keys, recorded by `neox_worker.py`.
With `GPT_NEOX`, the path of a GPT-NeoX checkout, further ones are drawn and compared on the spot
(`GPT_NEOX_SEED` chooses others).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import kerple
from megatron.checkpoints.sharding import canonical_shard, share_positions
from megatron.errors import CheckpointError
from megatron.model import GPTModel, ModelSpec
from megatron.model.outline import is_of_kernel
from megatron.neox_arguments import NeoXArgs
from megatron.training.optimizer import parameter_groups
from tests.checkpoints.small_models import logits_of
from tests.fixture_archives import unpacked
from tests.stories.neox_worker import STEP, VOCABULARY, drawn, random_tokens

MODELS = sorted(unpacked("neox_models").iterdir())
RECORDED = sorted(unpacked("neox_random").iterdir())
OF_ONE_RANK = [path for path in RECORDED if (path / "model.yml").is_file()]
EVERY = 3
"""Recordings hold the logits of every third position."""


def is_without_attention(config: dict[str, Any]) -> bool:
    """Models in which GPT-NeoX drops attention: refused here."""
    gated = config.get("activation") in ("geglu", "swiglu", "reglu", "glu", "bilinear")
    return bool(config.get("gpt_j_residual")) and not config.get("use_bias_in_mlp", True) and gated


def check_logits(
    model: Path, tokens: Any, logits: Any, config: dict[str, Any], atol: float = 2e-5
) -> None:
    if is_without_attention(config):
        with pytest.raises(CheckpointError, match="drops the output of attention"):
            kerple.load_pretrained(model)
        return
    found = logits_of(kerple.load_pretrained(model), torch.as_tensor(tokens).long()).numpy()
    step = -(-found.shape[1] // logits.shape[1])
    np.testing.assert_allclose(found[:, ::step], logits, rtol=0, atol=atol)


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.name)
def test_logits_are_gpt_neoxs(model: Path) -> None:
    with np.load(model / "expected.npz") as expected:
        check_logits(model, expected["tokens"], expected["logits"], {})


@pytest.mark.parametrize("recording", RECORDED, ids=lambda path: path.name)
def test_random_models_have_gpt_neoxs_logits(recording: Path, tmp_path: Path) -> None:
    with np.load(recording / "expected.npz") as expected:
        found = dict(expected)
    if "tokens" in found:  # of two model-parallel ranks: recorded with their weights
        check_logits(recording, found["tokens"], found["logits"], {})
        return
    config = yaml.safe_load((recording / "model.yml").read_text())
    facts = json.loads(str(found["facts"]))
    write_checkpoint(tmp_path, config, facts)
    check_logits(tmp_path, random_tokens(int(found["seed"])), found["logits"], config)


def write_checkpoint(folder: Path, config: dict[str, Any], facts: dict[str, Any]) -> None:
    """The recorded model in GPT-NeoX's layout; its weights follow from their names."""
    weights = {name: drawn(name, tuple(shape)) for name, (shape, _, _) in facts.items()}
    (folder / STEP / "configs").mkdir(parents=True)
    (folder / "latest").write_text(STEP)
    (folder / STEP / "configs" / "model.yml").write_text(yaml.safe_dump(config))
    state = {"module": weights, "iteration": 3}
    torch.save(state, folder / STEP / "mp_rank_00_model_states.pt")


@pytest.mark.parametrize("recording", OF_ONE_RANK, ids=lambda path: path.name)
def test_first_weights_and_decay_are_gpt_neoxs(recording: Path) -> None:
    with np.load(recording / "expected.npz") as expected:
        facts = json.loads(str(expected["facts"]))
    check_start(yaml.safe_load((recording / "model.yml").read_text()), facts)


def check_start(config: dict[str, Any], facts: dict[str, Any]) -> None:
    """The standard deviation of each parameter, and whether it is decayed.

    The decay of T5's table and biases of norms with use_bias_in_norms: false are rows of
    docs/coming_from_neox.md.
    """
    args = NeoXArgs.from_dict(config)
    model = GPTModel(ModelSpec.from_args(args, VOCABULARY))
    named = {n.removeprefix("sequential."): p for n, p in model.named_parameters()}
    decayed = {id(p) for p in parameter_groups(model.named_parameters(), 0.1)[0]["params"]}
    theirs = {
        name.removeprefix("sequential."): torch.tensor([deviation, float(is_decayed)])
        for name, (_, deviation, is_decayed) in facts.items()
    }
    theirs = share_positions(canonical_shard(theirs, args.model))
    if not args.model.use_bias_in_norms:
        theirs = {name: fact for name, fact in theirs.items() if "norm.bias" not in name}
    assert theirs.keys() == named.keys()
    for name, fact in theirs.items():
        parameter = named[name]
        own, noise = float(parameter.detach().std(correction=0)), 5 / parameter.numel() ** 0.5
        assert own == pytest.approx(float(fact[0]), rel=noise, abs=1e-6), name
        assert is_of_kernel(name) or (id(parameter) in decayed) == bool(fact[1]), name


# Further models, drawn here and built by a GPT-NeoX checkout.


def random_config(source: random.Random) -> dict[str, Any]:
    """A small model over every key that GPT-NeoX's model has and ours has too."""
    heads, layers = source.choice([2, 3, 4, 6]), source.choice([1, 2, 3, 4])
    config: dict[str, Any] = {
        "num_layers": layers,
        "num_attention_heads": heads,
        "hidden_size": heads * source.choice([8, 12, 16]),
        "seq_length": 40,
        "max_position_embeddings": 40,
        "make_vocab_size_divisible_by": 8,
        "norm": source.choice(["layernorm", "rmsnorm", "scalenorm", "non_parametric_layernorm"]),
        "activation": source.choice(
            ["gelu", "geglu", "relu", "softsign", "swish", "mish", "silu", "swiglu", "reglu", "glu",
             "bilinear"]
        ),
        "pos_emb": source.choice(["learned", "sinusoidal", "rotary", "rpe", "alibi", "none"]),
        "init_method": source.choice(
            ["normal", "scaled_normal", "scaled_orthogonal", "xavier_uniform", "xavier_normal",
             "wang_init", "small_init"]
        ),
        "output_layer_init_method": source.choice(["scaled_normal", "wang_init", "normal"]),
        "layernorm_epsilon": source.choice([1e-5, 1e-3]),
        "tokenizer_type": "CharLevelTokenizer",
        "train_micro_batch_size_per_gpu": 1,
        "train_iters": 1,
        "weight_decay": 0.1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
    }  # fmt: skip
    for flag in ("gpt_j_residual", "gpt_j_tied", "no_weight_tying", "use_qk_layernorm",
                 "apply_query_key_layer_scaling", "bias_gelu_fusion"):  # fmt: skip
        config[flag] = source.random() < 0.4
    for flag in ("use_bias_in_attn_linear", "use_bias_in_norms", "use_bias_in_mlp"):
        config[flag] = source.random() < 0.7
    if config["pos_emb"] == "rotary":
        config |= {"rotary_pct": source.choice([0.5, 1.0]), "rotary_emb_base": 1000}
    if config["pos_emb"] == "rpe":
        config |= {"rpe_num_buckets": 8, "rpe_max_distance": 20}
    if source.random() < 0.4:
        config["num_kv_heads"] = source.choice([n for n in (1, 2, 3, heads) if heads % n == 0])
    if source.random() < 0.3:
        config["sliding_window_width"] = source.choice([1, 5, 17])
    if source.random() < 0.5:
        config["intermediate_size"] = source.choice([48, 96, 100])
        config["mlp_multiple_of"] = source.choice([1, 4])
    return config


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """Folders with checkpoints and logits that GPT-NeoX's own modules made."""
    checkout = os.environ.get("GPT_NEOX")
    if not checkout:
        pytest.skip("needs a GPT-NeoX checkout: set GPT_NEOX to its path")
    place = tmp_path_factory.mktemp("neox")
    source = random.Random(int(os.environ.get("GPT_NEOX_SEED", "1")))
    jobs = [
        {"folder": str(place / f"{number:02d}"), "config": random_config(source), "seed": number}
        for number in range(24)
    ]
    (place / "jobs.json").write_text(json.dumps(jobs))
    worker = Path(__file__).with_name("neox_worker.py")
    command = [sys.executable, str(worker), checkout, str(place / "jobs.json")]
    result = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-2000:]
    yield sorted(path for path in place.iterdir() if path.is_dir())


def test_models_drawn_now_are_gpt_neoxs(built: list[Path]) -> None:
    done = 0
    for folder in built:
        if (folder / "refused").is_file():  # GPT-NeoX cannot run a plain MLP without biases
            continue
        config = yaml.safe_load((folder / STEP / "configs" / "model.yml").read_text())
        with np.load(folder / "expected.npz") as expected:
            logits, seed = expected["logits"], int(expected["seed"])
            facts = json.loads(str(expected["facts"]))
        check_logits(folder, random_tokens(seed), logits, config, atol=1e-4)
        check_start(config, facts)
        done += 1
    assert done >= len(built) // 2
