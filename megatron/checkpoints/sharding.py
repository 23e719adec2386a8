"""Canonical names of weights, from and to GPT-NeoX's, and how ranks shard each.

Canonical names, and the facts of parameters that both need, are those of `model/outline.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron.errors import CheckpointError
from megatron.model.layer_list import FIRST_LAYER
from megatron.model.outline import ModelOutline, outline_of, split_name
from megatron.model.position_names import canonical_name
from megatron.model.positional_embeddings import alibi_slopes
from megatron.mpu.parallel_layers import ParameterFacts
from megatron.neox_arguments.catalogue import method
from megatron.neox_arguments.model_keys import ModelArgs

_BUFFERS = (
    "attention.rotary_emb.",
    "attention.alibi_embed.",
    "attention.bias",
    "attention.masked_bias",
    "rotary_pos_emb.",
    "position_embeddings.inv_freq",  # of sinusoidal positions; learned ones have a weight
)
_UNUSED_NORM = "post_attention_layernorm."  # GPT-NeoX saves it, though gpt_j_tied leaves it unused
EMBEDDING = "0.word_embeddings.weight"


def strip_prefix(name: str, source: Path) -> str:
    """A module's name to the canonical one: `[module.]sequential.3.x` -> `3.x`."""
    short = name.removeprefix("module.").removeprefix("sequential.")
    index, _, rest = short.partition(".")
    if index.isdigit() and rest:
        return short
    if index == "tied_modules":
        return f"0.{rest.partition('.')[2]}"
    raise CheckpointError(f"{source}: {name!r:.100} is not `sequential.<index>.<name>`")


def canonical_names(module: nn.Module) -> dict[nn.Parameter, str]:
    """The parameters of a model, or of a pipeline's stage, with their canonical names."""
    return {p: strip_prefix(name, Path("model")) for name, p in module.named_parameters()}


def canonical_shard(shard: Mapping[str, Tensor], model: ModelArgs) -> dict[str, Tensor]:
    """One model-parallel rank's weights under canonical names, buffers left out."""
    ours = _our_names(outline_of(model))
    shares_norm = model.gpt_j_residual and model.gpt_j_tied
    tied_head = None if model.no_weight_tying else f"{model.num_layers + 4}.word_embeddings.weight"
    result: dict[str, Tensor] = {}
    for name, tensor in shard.items():
        index, rest = split_name(name)
        if rest.startswith(_BUFFERS) or (shares_norm and rest.startswith(_UNUSED_NORM)):
            continue
        if f"{index}.{rest}" == tied_head:
            result.setdefault(EMBEDDING, tensor)
            continue
        own = ours.get(rest, rest)
        if rest.startswith("attention.rpe.") and tensor.dim() == 3:  # [heads, 1, 1]
            tensor = tensor.reshape(-1)
        result[f"{index}.{own}"] = tensor
    # The earlier LLaMA blocks again: w3 is the value, w1 the gate.
    for name in [name for name in result if name.endswith(".mlp.w1.weight")]:
        block = name.removesuffix("w1.weight")
        value = result.pop(f"{block}w3.weight", None)
        if value is None:
            raise CheckpointError(f"{name} is there, but {block}w3.weight is missing")
        result[f"{block}dense_h_to_4h.weight"] = torch.cat((value, result.pop(name)))
    return result


def _our_names(outline: ModelOutline) -> dict[str, str]:
    """What a layer's file of GPT-NeoX or the official KERPLE code has -> our name in the layer.

    The official code has the names of GPT-NeoX 2.0 for all but the kernel, and they are ours.
    """
    layer = outline.facts_in_layer(FIRST_LAYER)
    kernel = {f"positions.{name}": facts for name, facts in outline.kernel.items()}
    names = {facts.neox: name for name, facts in (layer | kernel).items() if facts.neox}
    # one name of GPT-NeoX's earlier LLaMA blocks
    return {**names, "mlp.w2.weight": "mlp.dense_4h_to_h.weight"}


def share_positions(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The official code writes its one kernel into every layer: keep it once, at index 1.

    Under pipeline parallelism its stages trained copies of their own. Where copies differ, they
    stay per layer, and the model is built with `kerple_share: per_layer`.
    """
    shared: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        _, rest = split_name(name)
        if rest.startswith("positions."):
            once = rest.replace("positions.", "1.embedding.", 1)
            if not torch.equal(shared.setdefault(once, tensor), tensor):
                return weights
        else:
            shared[name] = tensor
    return shared


def neox_shard(
    shard: Mapping[str, Tensor], model: ModelArgs, rank: int, mp: int
) -> dict[str, Tensor]:
    """Back: under their names, the kernel written into each layer.

    KERPLE's kernels exist in the official code only, which has the names of GPT-NeoX 2.0.
    """
    outline, known = outline_of(model), method(model.pos_emb)
    is_official = known is not None and known.official is not None
    per_layer: dict[str, Tensor] = {}
    result: dict[str, Tensor] = {}
    for name, tensor in shard.items():
        index, rest = split_name(name)
        theirs = outline.facts(name).neox or rest
        if index == 1:
            per_layer[theirs] = tensor if tensor.dim() == 2 else tensor.reshape(-1, 1, 1)
        else:
            result[f"{index}.{rest if is_official else theirs}"] = tensor
    if canonical_name(model.pos_emb) == "sinusoidal":
        exponents = torch.arange(0, model.hidden_size, 2).float() / model.hidden_size
        result["0.position_embeddings.inv_freq"] = 1.0 / (10000**exponents)
    if model.gpt_j_residual and model.gpt_j_tied:
        for name in [name for name in result if ".input_layernorm." in name]:
            start = torch.zeros_like if name.endswith(".bias") else torch.ones_like
            unused = name.replace("input_layernorm.", _UNUSED_NORM)
            result[unused] = start(result[name])
    if canonical_name(model.pos_emb) == "alibi":
        slopes = torch.tensor(alibi_slopes(model.num_attention_heads)).chunk(mp)[rank]
        per_layer["attention.alibi_embed.slopes"] = slopes
    for layer in range(FIRST_LAYER, FIRST_LAYER + model.num_layers):
        result |= {f"{layer}.{name}": tensor for name, tensor in per_layer.items()}
    if not model.no_weight_tying and EMBEDDING in shard:
        result[f"{model.num_layers + 4}.word_embeddings.weight"] = shard[EMBEDDING]
    return result


# Model-parallel shards to whole tensors and back, by canonical name.


@dataclass(frozen=True)
class Sharding:
    """How one model's weights are sharded, by the facts of its parameters.

    `sums_parallel_biases`: GPT-NeoX adds the biases of both branches of a parallel residual on
    every rank, before the sum over ranks, so that the bias in effect is the sum of the copies.
    """

    outline: ModelOutline
    sums_parallel_biases: bool = False

    @classmethod
    def of(cls, model: ModelArgs, *, neox: bool) -> Sharding:
        """The sharding of a model; `neox` for files of GPT-NeoX or the official KERPLE code."""
        return cls(outline_of(model), sums_parallel_biases=neox and model.gpt_j_residual)

    def facts(self, name: str) -> ParameterFacts:
        """What a weight's parameter declares."""
        return self.outline.facts(name)

    def is_summed(self, name: str) -> bool:
        return self.sums_parallel_biases and self.facts(name).after_sum

    def split(self, name: str, whole: Tensor, rank: int, size: int) -> Tensor:
        """This rank's share of a whole tensor."""
        if size == 1:
            return whole
        if self.is_summed(name):
            return whole / size
        dim = self.facts(name).split
        if dim is None:
            return whole
        parts = self.facts(name).part_sizes(whole.shape)
        if uneven := [part for part in parts if part % size]:
            raise CheckpointError(
                f"{name} {tuple(whole.shape)}: {uneven[0]} cannot be split over {size} "
                "model-parallel ranks; choose a size that divides it"
            )
        pieces = [part.chunk(size, dim)[rank] for part in whole.split(parts, dim)]
        return torch.cat(pieces, dim).contiguous()

    def merge(self, name: str, shards: Sequence[Tensor]) -> Tensor:
        """The whole tensor."""
        if len(shards) == 1:
            return shards[0]
        if self.is_summed(name):
            return torch.stack([shard.float() for shard in shards]).sum(0).to(shards[0].dtype)
        dim = self.facts(name).split
        if dim is None:
            return _agree(shards)
        parts = [shard.split(self.facts(name).part_sizes(shard.shape), dim) for shard in shards]
        return torch.cat([piece for pieces in zip(*parts, strict=True) for piece in pieces], dim)


def with_rows(whole: Tensor, rows: int) -> Tensor:
    """The first `rows` rows; those that are missing are zero."""
    kept = whole[:rows]
    missing = rows - kept.shape[0]
    return torch.cat((kept, kept.new_zeros(missing, *kept.shape[1:]))) if missing else kept


def _agree(shards: Sequence[Tensor]) -> Tensor:
    """The mean of copies that should be equal and may differ by rounding."""
    first = shards[0]
    if all(torch.equal(first, other) for other in shards[1:]):
        return first
    return torch.stack([shard.float() for shard in shards]).mean(0).to(first.dtype)


def merge_shards(shards: Sequence[Mapping[str, Tensor]], sharding: Sharding) -> dict[str, Tensor]:
    """All model-parallel ranks' weights as whole tensors."""
    names = list(shards[0])
    problems = [
        f"  {name} is missing on model-parallel rank {rank}"
        for rank, shard in enumerate(shards)
        for name in sorted({n for other in shards for n in other} - set(shard))
    ]
    problems += [
        f"  {name}: shapes {[tuple(shard[name].shape) for shard in shards]} do not agree"
        for name in names
        if not problems and len({shard[name].shape for shard in shards}) > 1
    ]
    if problems:
        raise CheckpointError("model-parallel shards do not fit together:\n" + "\n".join(problems))
    return {name: sharding.merge(name, [shard[name] for shard in shards]) for name in names}
