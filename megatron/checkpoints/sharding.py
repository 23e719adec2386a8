"""Names of weights, every generation's spelling to one and back, and how ranks split each.

The canonical name is `<layer index>.<name inside the layer>`, as in our own model:

    0.word_embeddings.weight          1.embedding.r1           (kernel shared by all layers)
    2.attention.query_key_value.bias  2.positions.r1           (kernel of one layer)
    L+3.norm.weight                   L+4.final_linear.weight
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron.errors import CheckpointError
from megatron.model.layer_formulas import GATED
from megatron.model.layer_list import FIRST_LAYER
from megatron.model.position_names import canonical_name
from megatron.model.positional_embeddings import alibi_slopes
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
# GPT-NeoX 2.0 and the official KERPLE code -> GPT-NeoX of 2024 and later
_NEWER = {"mlp.dense_h_to_4h.": "mlp.linear1.", "mlp.dense_4h_to_h.": "mlp.linear2."}
# and back, with one name of its earlier LLaMA blocks
_OLDER = {newer: older for older, newer in _NEWER.items()} | {"mlp.w2.": "mlp.dense_4h_to_h."}
_RPE = "attention.rpe."
_UNUSED_NORM = "post_attention_layernorm."  # GPT-NeoX saves it, though gpt_j_tied leaves it unused
EMBEDDING = "0.word_embeddings.weight"


def split_name(name: str) -> tuple[int, str]:
    """`12.mlp.dense_h_to_4h.bias` -> 12 and the rest."""
    index, _, rest = name.partition(".")
    return int(index), rest


def is_of_kernel(name: str) -> bool:
    """Whether a weight belongs to a positional embedding with tables, shared or of one layer."""
    return split_name(name)[1].startswith(("embedding.", "positions."))


def renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """A name whose prefix is one of these, with the other one; any other name as it is."""
    for prefix, other in prefixes.items():
        if name.startswith(prefix):
            return other + name[len(prefix) :]
    return name


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


def official_kernel_names(pos_emb: str) -> dict[str, str]:
    """The official code's name of each kernel parameter -> ours (they swap letters)."""
    known = method(pos_emb)
    if known is None:
        return {}
    if known.name == "rpe":
        return {"weight": "weight"}
    return {theirs: ours for ours, theirs in known.official_parameters.items()}


def canonical_shard(shard: Mapping[str, Tensor], model: ModelArgs) -> dict[str, Tensor]:
    """One model-parallel rank's weights under canonical names, buffers left out."""
    kernel = official_kernel_names(model.pos_emb)
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
        if rest.startswith(_RPE) and rest[len(_RPE) :] in kernel:
            rest = f"positions.{kernel[rest[len(_RPE) :]]}"
            tensor = tensor if rest.endswith(".weight") else tensor.reshape(-1)
        result[f"{index}.{renamed(rest, _OLDER)}"] = tensor
    # The earlier LLaMA blocks again: w3 is the value, w1 the gate.
    for name in [name for name in result if name.endswith(".mlp.w1.weight")]:
        block = name.removesuffix("w1.weight")
        value = result.pop(f"{block}w3.weight", None)
        if value is None:
            raise CheckpointError(f"{name} is there, but {block}w3.weight is missing")
        result[f"{block}dense_h_to_4h.weight"] = torch.cat((value, result.pop(name)))
    return result


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
    kernel = {ours: theirs for theirs, ours in official_kernel_names(model.pos_emb).items()}
    known = method(model.pos_emb)
    is_official = known is not None and known.official is not None
    per_layer: dict[str, Tensor] = {}
    result: dict[str, Tensor] = {}
    for name, tensor in shard.items():
        index, rest = split_name(name)
        if index == 1:
            parameter = rest.removeprefix("embedding.")
            stored = tensor if parameter == "weight" else tensor.reshape(-1, 1, 1)
            per_layer[f"{_RPE}{kernel[parameter]}"] = stored
        else:
            result[f"{index}.{rest if is_official else renamed(rest, _NEWER)}"] = tensor
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
    if not model.no_weight_tying:
        result[f"{model.num_layers + 4}.word_embeddings.weight"] = shard[EMBEDDING]
    return result


# Model-parallel shards to whole tensors and back, by canonical name.
#
# split along rows     word_embeddings, query_key_value, dense_h_to_4h, kernel parameters, and what
#                      else a head has: forget_gate, sinks, softmax_scale
# split along columns  attention.dense, dense_4h_to_h, T5's table
# either               final_linear (output_layer_parallelism)
# whole on every rank  norms, learned positions, biases after a row-parallel product

_ROWS = (
    "word_embeddings.",
    "attention.query_key_value.",
    "attention.forget_gate.",
    "attention.sinks",
    "attention.softmax_scale",
    "mlp.dense_h_to_4h.",
)
_COLUMNS = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")
_SUMMED = ("attention.dense.bias", "mlp.dense_4h_to_h.bias")
_WORDS = ("word_embeddings.weight", "final_linear.weight")


@dataclass(frozen=True)
class Sharding:
    """How one model's weights are cut.

    `sums_parallel_biases`: GPT-NeoX adds the biases of both branches of a parallel residual on
    every rank, before the sum over ranks, so that the bias in effect is the sum of the copies.
    """

    gated: bool = False
    queries_per_key: int = 1
    head: str = "column"
    t5: bool = False
    sums_parallel_biases: bool = False

    @classmethod
    def of(cls, model: ModelArgs, *, neox: bool) -> Sharding:
        """The cuts of a model; `neox` for files of GPT-NeoX or the official KERPLE code."""
        return cls(
            gated=model.activation in GATED,
            queries_per_key=model.num_attention_heads // model.kv_heads,
            head=model.output_layer_parallelism,
            t5=canonical_name(model.pos_emb) == "rpe",
            sums_parallel_biases=neox and model.gpt_j_residual,
        )

    def dim(self, name: str) -> int | None:
        """The dimension along which a weight is cut; None: whole on every rank."""
        _, rest = split_name(name)
        if rest.startswith(_ROWS):
            return 0
        if rest in _COLUMNS:
            return 1
        if rest.startswith("final_linear."):
            return 0 if self.head == "column" else 1
        if is_of_kernel(name):
            return 1 if self.t5 else 0
        return None

    def parts(self, name: str, shape: Sequence[int]) -> list[int]:
        """The sizes of stacked parts that are cut each on its own; none if nothing is cut."""
        dim = self.dim(name)
        if dim is None:
            return []
        shares = [1]
        if self.gated and ".mlp.dense_h_to_4h." in name:
            shares = [1, 1]
        elif self.queries_per_key > 1 and ".attention.query_key_value." in name:
            shares = [self.queries_per_key, 1, 1]
        return [share * shape[dim] // sum(shares) for share in shares]

    def has_vocabulary_rows(self, name: str) -> bool:
        """Whether rows are words, the last ones padding that depends on the model-parallel size."""
        return split_name(name)[1] in _WORDS

    def is_summed(self, name: str) -> bool:
        return self.sums_parallel_biases and split_name(name)[1] in _SUMMED

    def split(self, name: str, whole: Tensor, rank: int, size: int) -> Tensor:
        """This rank's share of a whole tensor."""
        if size == 1:
            return whole
        if self.is_summed(name):
            return whole / size
        dim = self.dim(name)
        if dim is None:
            return whole
        parts = self.parts(name, whole.shape)
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
        dim = self.dim(name)
        if dim is None:
            return _agree(shards)
        parts = [shard.split(self.parts(name, shard.shape), dim) for shard in shards]
        return torch.cat([piece for pieces in zip(*parts, strict=True) for piece in pieces], dim)


def with_rows(whole: Tensor, rows: int) -> Tensor:
    """The first `rows` rows; those that are missing are zero."""
    kept = whole[:rows]
    missing = rows - kept.shape[0]
    return torch.cat((kept, kept.new_zeros(missing, *kept.shape[1:]))) if missing else kept


def _agree(shards: Sequence[Tensor]) -> Tensor:
    """Copies that should be equal; rounding may have moved them apart: their mean."""
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


def split_weights(
    weights: Mapping[str, Tensor], sharding: Sharding, size: int
) -> list[dict[str, Tensor]]:
    """One mapping for each model-parallel rank."""
    return [
        {name: sharding.split(name, whole, rank, size) for name, whole in weights.items()}
        for rank in range(size)
    ]
