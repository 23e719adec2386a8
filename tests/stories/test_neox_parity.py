"""GPT-NeoX checkpoints give transformers' GPT-NeoX logits.

The files are written here by hand from a Hugging Face model's weights, in both generations' names,
so that the reader is checked against an implementation that knows nothing of ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import kerple
from tests.checkpoints.small_models import logits_of, tokens

LAYERS, HIDDEN, HEADS = 3, 48, 4


def hugging_face_model(parallel: bool, tied: bool, activation: str) -> GPTNeoXForCausalLM:
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=64, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=80, max_position_embeddings=64, use_parallel_residual=parallel,
        rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 0.5, "rope_type": "default"},
        layer_norm_eps=1e-3, tie_word_embeddings=tied, hidden_act=activation,
    )  # fmt: skip
    model = GPTNeoXForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def neox_layers(model: GPTNeoXForCausalLM, newer_names: bool) -> dict[int, dict[str, Tensor]]:
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    layers: dict[int, dict[str, Tensor]] = {
        0: {"word_embeddings.weight": state["gpt_neox.embed_in.weight"]},
        LAYERS + 3: {
            "norm.weight": state["gpt_neox.final_layer_norm.weight"],
            "norm.bias": state["gpt_neox.final_layer_norm.bias"],
        },
    }
    for number in range(LAYERS):
        prefix = f"gpt_neox.layers.{number}."
        content = {n[len(prefix) :]: t for n, t in state.items() if n.startswith(prefix)}
        if newer_names:
            content = {
                n.replace("dense_h_to_4h", "linear1").replace("dense_4h_to_h", "linear2"): t
                for n, t in content.items()
            }
        else:
            content["attention.rotary_emb.inv_freq"] = torch.ones(3)
        layers[number + 2] = content
    if model.config.tie_word_embeddings:
        layers[LAYERS + 4] = dict(layers[0])
    else:
        layers[LAYERS + 4] = {"final_linear.weight": state["lm_head.weight"]}
    return layers


def shard(name: str, tensor: Tensor, rank: int, mp: int, *, parallel: bool, row: bool) -> Tensor:
    if mp == 1:
        return tensor
    if name.endswith(("attention.dense.bias", "linear2.bias", "dense_4h_to_h.bias")):
        # with a parallel residual every rank adds its bias before the sum over ranks
        share = torch.tensor([0.75, 0.25])[rank] if parallel else 1.0
        return tensor * share
    by_columns = ("attention.dense.weight", "linear2.weight", "dense_4h_to_h.weight")
    if name.endswith(by_columns) or (row and "final_linear" in name):
        return tensor.chunk(mp, 1)[rank].clone()
    by_rows = ("query_key_value", "linear1", "dense_h_to_4h", "word_embeddings", "final_linear")
    return tensor.chunk(mp, 0)[rank].clone() if any(n in name for n in by_rows) else tensor


def write(
    folder: Path, layers: dict[int, dict[str, Tensor]], config: dict[str, Any],
    *, mp: int, by_layer: bool, row: bool,
) -> None:  # fmt: skip
    step = folder / "global_step11"
    (step / "configs").mkdir(parents=True)
    (folder / "latest").write_text("global_step11")
    (step / "configs" / "1-3B.yml").write_text(yaml.safe_dump(config))
    for rank in range(mp):
        module: dict[str, Tensor] = {}
        for index, content in layers.items():
            cut = {
                name: shard(name, t, rank, mp, parallel=config["gpt-j-residual"], row=row)
                for name, t in content.items()
            }
            if by_layer:
                torch.save(cut, step / f"layer_{index:02d}-model_{rank:02d}-model_states.pt")
            module |= {f"sequential.{index}.{name}": t for name, t in cut.items()}
        state = {"module": None if by_layer else module, "iteration": 11}
        torch.save(state, step / f"mp_rank_{rank:02d}_model_states.pt")


@pytest.mark.parametrize(
    ("parallel", "tied", "mp", "by_layer", "newer", "row", "activation"),
    [
        (True, False, 1, True, True, False, "gelu"),
        (True, False, 2, True, True, False, "gelu"),
        (False, False, 2, True, False, True, "gelu"),
        (True, True, 2, False, True, False, "gelu_pytorch_tanh"),
        (False, True, 1, True, False, False, "gelu_pytorch_tanh"),
        (False, True, 1, False, False, False, "relu"),
    ],
)
def test_neox_checkpoints_equal_transformers(
    tmp_path: Path, parallel: bool, tied: bool, mp: int, by_layer: bool, newer: bool, row: bool,
    activation: str,
) -> None:  # fmt: skip
    model = hugging_face_model(parallel, tied, activation)
    config: dict[str, Any] = {
        "num-layers": LAYERS,
        "hidden-size": HIDDEN,
        "num-attention-heads": HEADS,
        "intermediate-size": 80,
        "seq-length": 32,
        "max-position-embeddings": 64,
        "pos-emb": "rotary",
        "rotary-pct": 0.5,
        "rotary-emb-base": 500,
        "gpt-j-residual": parallel,
        "no-weight-tying": not tied,
        "layernorm-epsilon": 1e-3,
        "activation": "relu" if activation == "relu" else "gelu",
        "bias-gelu-fusion": "tanh" in activation,
        "model-parallel-size": mp,
        "pipe-parallel-size": int(by_layer),
        "output-layer-parallelism": "row" if row else "column",
        "train_micro_batch_size_per_gpu": 1,
        "tokenizer-type": "CharLevelTokenizer",
    }
    layers = neox_layers(model, newer)
    write(tmp_path, layers, config, mp=mp, by_layer=by_layer, row=row)
    loaded = kerple.load_pretrained(tmp_path)
    assert loaded.kind == "neox"
    assert loaded.iteration == 11
    expected = logits_of(model, tokens(60))
    torch.testing.assert_close(logits_of(loaded, tokens(60)), expected, atol=1e-4, rtol=0)


def test_llama_blocks_of_earlier_neox_are_joined(tmp_path: Path) -> None:
    """w2(silu(w1 x) * w3 x) becomes one matrix with the gate in its second half."""
    model = hugging_face_model(False, False, "relu")
    layers = neox_layers(model, newer_names=False)
    generator = torch.Generator().manual_seed(5)
    matrices = {}
    for index in range(2, LAYERS + 2):
        layers[index] = {n: t for n, t in layers[index].items() if ".mlp." not in f".{n}"}
        for name, shape in {"w1": (64, HIDDEN), "w3": (64, HIDDEN), "w2": (HIDDEN, 64)}.items():
            matrices[index, name] = torch.randn(shape, generator=generator)
            layers[index][f"mlp.{name}.weight"] = matrices[index, name]
    config = {
        "num-layers": LAYERS, "hidden-size": HIDDEN, "num-attention-heads": HEADS,
        "intermediate-size": 64, "seq-length": 32, "pos-emb": "rotary", "gpt-j-residual": False,
        "no-weight-tying": True, "activation": "swiglu", "use-bias-in-mlp": False,
    }  # fmt: skip
    write(tmp_path, layers, config, mp=1, by_layer=True, row=False)
    mlp = kerple.load_pretrained(tmp_path).layers[1].mlp
    x = torch.randn(4, HIDDEN, generator=generator)
    gate, value = x @ matrices[3, "w1"].T, x @ matrices[3, "w3"].T
    expected = (torch.nn.functional.silu(gate) * value) @ matrices[3, "w2"].T
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), expected, atol=1e-4, rtol=1e-5)
