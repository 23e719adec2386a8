"""Names of weights in Hugging Face files: GPT-NeoX's there, with `positions` for the kernel."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from megatron.checkpoints.names import FIRST_LAYER, split_name

__all__ = ["from_hf_names", "to_hf_names"]

_LAYER = re.compile(r"^gpt_neox\.layers\.(\d+)\.(.+)$")
_BUFFERS = re.compile(r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$")
_HEADS = ("lm_head.weight", "embed_out.weight")


def to_hf_names(
    weights: Mapping[str, Tensor], num_layers: int, head: str = "lm_head.weight"
) -> dict[str, Tensor]:
    """Canonical names to Hugging Face's."""
    return {_to_hf(name, num_layers, head): tensor for name, tensor in weights.items()}


def _to_hf(name: str, num_layers: int, head: str) -> str:
    index, rest = split_name(name)
    if index == 0:
        embedding, _, leaf = rest.partition(".")
        return f"gpt_neox.{'embed_in' if 'word' in embedding else 'embed_positions'}.{leaf}"
    if index == 1:
        return rest.replace("embedding.", "gpt_neox.positions.", 1)
    if index == num_layers + 3:
        return rest.replace("norm.", "gpt_neox.final_layer_norm.", 1)
    if index == num_layers + 4:
        return head
    return f"gpt_neox.layers.{index - FIRST_LAYER}.{rest}"


def from_hf_names(
    weights: Mapping[str, Tensor], num_layers: int, *, tied: bool
) -> dict[str, Tensor]:
    """Hugging Face's names to canonical ones; buffers and a tied head are left out."""
    result: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if _BUFFERS.search(name) or (tied and name in _HEADS):
            continue
        result[_from_hf(name, num_layers)] = tensor
    return result


def _from_hf(name: str, num_layers: int) -> str:
    if match := _LAYER.match(name):
        return f"{int(match[1]) + FIRST_LAYER}.{match[2]}"
    if name in _HEADS:
        return f"{num_layers + 4}.final_linear.weight"
    for theirs, ours in (
        ("gpt_neox.embed_in.", "0.word_embeddings."),
        ("gpt_neox.embed_positions.", "0.position_embeddings."),
        ("gpt_neox.positions.", "1.embedding."),
        ("gpt_neox.final_layer_norm.", f"{num_layers + 3}.norm."),
    ):
        if name.startswith(theirs):
            return ours + name[len(theirs) :]
    # Kept under an index of no layer, so that it is listed among the misfits.
    return f"{num_layers + 5}.{name}"
