"""Names of weights: every generation's spelling to one, and back.

The canonical name is `<layer index>.<name inside the layer>`, as in our own model:

    0.word_embeddings.weight          1.embedding.r1           (kernel shared by all layers)
    2.attention.query_key_value.bias  2.positions.r1           (kernel of one layer)
    L+3.norm.weight                   L+4.final_linear.weight
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron.errors import CheckpointError
from megatron.model.layer_list import FIRST_LAYER
from megatron.neox_arguments.catalogue import method

__all__ = [
    "FIRST_LAYER",
    "canonical_shard",
    "join_gate",
    "official_kernel_names",
    "share_positions",
    "split_name",
    "strip_prefix",
]

_BUFFERS = (
    "attention.rotary_emb.",
    "attention.alibi_embed.",
    "attention.bias",
    "attention.masked_bias",
    "rotary_pos_emb.",
    "position_embeddings.inv_freq",  # of sinusoidal positions; learned ones have a weight
)
# GPT-NeoX of 2024 and later -> GPT-NeoX 2.0 and KERPLE
_NEWER = {"mlp.linear1.": "mlp.dense_h_to_4h.", "mlp.linear2.": "mlp.dense_4h_to_h."}
_RPE = "attention.rpe."


def split_name(name: str) -> tuple[int, str]:
    """`12.mlp.dense_h_to_4h.bias` -> 12 and the rest."""
    index, _, rest = name.partition(".")
    return int(index), rest


def strip_prefix(name: str, source: Path) -> str:
    """A module's name to the canonical one: `[module.]sequential.3.x` -> `3.x`."""
    short = name.removeprefix("module.").removeprefix("sequential.")
    index, _, rest = short.partition(".")
    if index.isdigit() and rest:
        return short
    if index == "tied_modules":
        return f"0.{rest.partition('.')[2]}"
    raise CheckpointError(f"{source}: {name!r:.100} is not `sequential.<index>.<name>`")


def official_kernel_names(pos_emb: str) -> dict[str, str]:
    """The official code's name of each kernel parameter -> ours (they swap letters)."""
    known = method(pos_emb)
    if known is None:
        return {}
    if known.name == "rpe":
        return {"weight": "weight"}
    return {theirs: ours for ours, theirs in known.official_parameters.items()}


def canonical_shard(
    shard: Mapping[str, Tensor], *, pos_emb: str, num_layers: int, tied: bool
) -> dict[str, Tensor]:
    """One model-parallel rank's weights under canonical names, buffers left out."""
    kernel = official_kernel_names(pos_emb)
    result: dict[str, Tensor] = {}
    for name, tensor in shard.items():
        index, rest = split_name(name)
        if rest.startswith(_BUFFERS):
            continue
        if tied and index == num_layers + 4 and rest == "word_embeddings.weight":
            result.setdefault("0.word_embeddings.weight", tensor)
            continue
        if rest.startswith(_RPE) and rest[len(_RPE) :] in kernel:
            rest = f"positions.{kernel[rest[len(_RPE) :]]}"
            tensor = tensor if rest.endswith(".weight") else tensor.reshape(-1)
        for newer, older in _NEWER.items():
            if rest.startswith(newer):
                rest = older + rest[len(newer) :]
        result[f"{index}.{rest}"] = tensor
    return join_gate(result)


def join_gate(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """GPT-NeoX's earlier LLaMA blocks: w3 is the value, w1 the gate, w2 the way back."""
    result = {name: tensor for name, tensor in weights.items() if ".mlp.w" not in name}
    for name, gate in weights.items():
        index, rest = split_name(name)
        if rest == "mlp.w1.weight":
            value = weights.get(f"{index}.mlp.w3.weight")
            if value is None:
                raise CheckpointError(f"{name} is there, but {index}.mlp.w3.weight is missing")
            result[f"{index}.mlp.dense_h_to_4h.weight"] = torch.cat((value, gate))
        elif rest == "mlp.w2.weight":
            result[f"{index}.mlp.dense_4h_to_h.weight"] = gate
    return result


def _position_names(weights: Iterable[str]) -> dict[str, list[str]]:
    """Kernel parameter -> its names in the layers."""
    found: dict[str, list[str]] = {}
    for name in weights:
        _, rest = split_name(name)
        if rest.startswith("positions."):
            found.setdefault(rest[len("positions.") :], []).append(name)
    return found


def share_positions(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The official code writes its one kernel into every layer: keep it once, at index 1.

    Under pipeline parallelism its stages trained copies of their own. Where copies differ, they
    stay per layer, and the model is built with `kerple_share: per_layer`.
    """
    positions = _position_names(weights)
    for names in positions.values():
        first = weights[names[0]]
        if any(not torch.equal(first, weights[name]) for name in names[1:]):
            return weights
    moved = {name for names in positions.values() for name in names}
    result = {name: tensor for name, tensor in weights.items() if name not in moved}
    for parameter, names in positions.items():
        result[f"1.embedding.{parameter}"] = weights[names[0]]
    return result
