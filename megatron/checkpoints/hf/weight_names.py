"""Names and layouts of weights in Hugging Face files, from ours and to ours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.checkpoints.hf.architectures import Architecture, HFWeight
from megatron.errors import CheckpointError
from megatron.model import ModelSpec
from megatron.model.layer_list import FIRST_LAYER, Layer, LayerFactory

_BUFFERS = re.compile(r"(^|\.)(attention|attn)\.(bias|masked_bias)$|(^|\.)rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class WeightNames:
    """The names of one model's weights, here and there."""

    spec: ModelSpec
    table: Mapping[str, HFWeight]
    """How a canonical name begins -> where the weight is in their files."""
    architecture: Architecture | None = None
    unused: frozenset[str] = field(default_factory=frozenset)
    """Names of theirs that repeat others: a tied head."""

    @classmethod
    def of(cls, spec: ModelSpec, architecture: Architecture | None) -> WeightNames:
        """Without an architecture, the names of our own class, which its layers declare."""
        table = _own_names(spec) if architecture is None else _table(architecture, spec)
        heads = ("lm_head.weight", "embed_out.weight")
        return cls(
            spec, table, architecture, frozenset() if spec.no_weight_tying else frozenset(heads)
        )

    def to_theirs(self, name: str) -> tuple[HFWeight, list[str]]:
        """The entry of a weight of ours, and its names there."""
        for prefix, theirs in self.table.items():
            if name.startswith(prefix):
                return theirs, [begin + name[len(prefix) :] for begin in theirs.names]
        raise CheckpointError(f"{name}: has no name in a Hugging Face file")

    def to_ours(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Their names, found in files -> our weights with the names of their parts.

        Buffers and a tied head are left out. A name that is not known is kept under an index of no
        layer, to be listed among the misfits.
        """
        begins = {
            begin: (prefix, part, len(theirs.names))
            for prefix, theirs in self.table.items()
            for part, begin in enumerate(theirs.names)
        }
        found: dict[str, list[str]] = {}
        for name in names:
            if _BUFFERS.search(name) or name in self.unused:
                continue
            begin, rest = self._known_begin(name, begins)
            if begin is None:
                found[f"{self.spec.num_layers + 5}.{name}"] = [name]
                continue
            prefix, part, count = begins[begin]
            found.setdefault(prefix + rest, [""] * count)[part] = name
        for ours, parts in found.items():
            if "" in parts:
                missing = self.to_theirs(ours)[1][parts.index("")]
                raise CheckpointError(f"{missing} is missing; the others of {ours} are there")
        return found

    def _known_begin(self, name: str, begins: Mapping[str, object]) -> tuple[str | None, str]:
        candidates = [name]
        if self.architecture is not None:
            candidates += [
                to + name[len(begin) :]
                for begin, to in self.architecture.aliases.items()
                if name.startswith(begin)
            ]
            candidates.append(self.architecture.base + name)
        for candidate in candidates:
            for begin in begins:
                if candidate.startswith(begin):
                    return begin, candidate[len(begin) :]
        return None, name

    def parts(self, name: str, whole: Tensor) -> dict[str, Tensor]:
        """A weight of ours under their names."""
        theirs, names = self.to_theirs(name)
        if theirs.layout == "heads":
            pieces = self._heads(whole)
        elif theirs.layout == "stacked":
            pieces = list(whole.chunk(len(names)))
        else:
            pieces = [whole]
        if len(names) < len(pieces):
            pieces = [torch.cat(pieces)]
        if theirs.transposed and whole.dim() == 2:
            pieces = [piece.T for piece in pieces]
        return dict(zip(names, pieces, strict=True))

    def all_parts(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Weights of ours under their names, one after the other."""
        for name, whole in weights:
            yield from self.parts(name, whole).items()

    def whole(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """A weight of ours from theirs."""
        if split := next((t for p, t in self.table.items() if name.startswith(p)), None):
            try:
                return self._joined(split, parts)
            except RuntimeError as error:
                shapes = ", ".join(str(tuple(part.shape)) for part in parts)
                raise CheckpointError(
                    f"{name}: weights of the shapes {shapes} do not fit "
                    f"num_attention_heads = {self.spec.num_attention_heads} heads of "
                    f"{self.spec.head_dim}"
                ) from error
        return parts[0]

    def _joined(self, theirs: HFWeight, parts: Sequence[Tensor]) -> Tensor:
        if theirs.transposed:
            parts = [part.T if part.dim() == 2 else part for part in parts]
        if parts[0].is_meta:  # torch.cat of such would import a second's worth of torch
            rows, *rest = parts[0].shape
            return parts[0].new_empty(rows + sum(part.shape[0] for part in parts[1:]), *rest)
        if theirs.layout == "heads":
            parts = list(parts[0].split(self._sizes)) if len(parts) == 1 else parts
            if self.spec.kv_heads == self.spec.num_attention_heads:
                heads = (self.spec.num_attention_heads, self.spec.head_dim)
                return torch.stack([part.unflatten(0, heads) for part in parts], 1).flatten(0, 2)
        return torch.cat(tuple(parts)) if len(parts) > 1 else parts[0].contiguous()

    @property
    def _sizes(self) -> list[int]:
        """Rows of queries, keys and values."""
        width, keys = self.spec.head_dim, self.spec.kv_heads
        return [self.spec.num_attention_heads * width, keys * width, keys * width]

    def _heads(self, qkv: Tensor) -> list[Tensor]:
        """Queries, keys and values: of one head after another, or all of each (grouped heads)."""
        heads = self.spec.num_attention_heads
        if self.spec.kv_heads < heads:
            return list(qkv.split(self._sizes))
        return [part.flatten(0, 1) for part in qkv.unflatten(0, (heads, 3, -1)).unbind(1)]


def _own_names(spec: ModelSpec) -> dict[str, HFWeight]:
    return {
        f"{index}.{ours}": HFWeight(
            (theirs.format(number=index - FIRST_LAYER, head="lm_head.weight"),)
        )
        for index, layer in enumerate(LayerFactory(spec).layers())
        if isinstance(layer, Layer)
        for ours, theirs in layer.hf_names.items()
    }


def _table(architecture: Architecture, spec: ModelSpec) -> dict[str, HFWeight]:
    indices = {f"{{L+{i}}}": str(spec.num_layers + i) for i in (3, 4)}
    table = {}
    for ours, theirs in architecture.outside.items():
        for mark, index in indices.items():
            ours = ours.replace(mark, index)
        table[ours] = HFWeight((theirs,))
    for number in range(spec.num_layers):
        begin = architecture.layers.format(number=number)
        for ours, each in architecture.layer.items():
            table[f"{FIRST_LAYER + number}.{ours}"] = HFWeight(
                tuple(begin + name for name in each.names), each.layout, each.transposed
            )
    return table
