"""What a checkpoint is, in words and numbers; and what differs between two."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.checkpoints.reading import Checkpoint, Layout
from megatron.checkpoints.safe_files import load_mapping
from megatron.checkpoints.sharding import split_name
from megatron.errors import CheckpointError
from megatron.model.kernel_theory import effective_length
from megatron.model.layer_list import FIRST_LAYER
from megatron.model.position_base import PositionOptions, TableEmbedding
from megatron.model.position_names import build_positional_embedding


def describe(checkpoint: Checkpoint) -> dict[str, object]:
    """Facts about a checkpoint as plain data."""
    layout, spec = checkpoint.layout, checkpoint.spec
    files = [path for path in layout.directory.rglob("*") if path.is_file()]
    return {
        "path": str(layout.directory),
        "kind": checkpoint.kind,
        "iteration": checkpoint.iteration,
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "model_parallel_size": 1 if layout.is_hf else layout.mp_size,
        "layout": _layout_name(checkpoint),
        "optimizer_states": _has_optimizer(layout),
        "pos_emb": spec.pos_emb,
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_attention_heads,
        "padded_vocab_size": spec.padded_vocab_size,
        "seq_length": checkpoint.args.model.seq_length,
        "tied_head": not spec.no_weight_tying,
        "norm": spec.norm,
        "activation": spec.activation_name,
        "parameters": checkpoint.num_parameters,
        "kernel_parameters": sum(
            tensor.numel() for name, tensor in checkpoint.weights.items() if _is_kernel(name)
        ),
        "dtypes": sorted(
            {str(t.dtype).removeprefix("torch.") for t in checkpoint.weights.values()}
        ),
        "non_finite": [n for n, t in checkpoint.weights.items() if not bool(t.isfinite().all())],
        "config_hash": checkpoint.args.config_hash(),
    }


def _has_optimizer(layout: Layout) -> bool:
    """Whether training could be resumed: in files of ZeRO's, or beside the weights without it."""
    if layout.zero_optimizer_files or layout.is_universal:
        return True
    state = load_mapping(min(layout.mp_files.values())) if layout.mp_files else {}
    return bool(state.get("optimizer"))


def _layout_name(checkpoint: Checkpoint) -> str:
    layout = checkpoint.layout
    if layout.is_hf:
        return "Hugging Face folder"
    if layout.is_universal:
        return "universal: one folder per parameter"
    if layout.is_zero3:
        return "ZeRO stage 3 partitions"
    return "one file per layer" if layout.layer_files else "one file per model-parallel rank"


def _is_kernel(name: str) -> bool:
    return split_name(name)[1].startswith(("embedding.", "positions."))


@dataclass(frozen=True)
class KernelReport:
    """One kernel: its values per head in effect, and how far each head looks."""

    layer: int | None
    values: dict[str, list[float]]
    effective_lengths: list[int | None] = field(default_factory=list)
    """None: further than the longest distance looked at."""


def kernel_of(checkpoint: Checkpoint, longest: int = 20480) -> list[KernelReport]:
    """The kernels of a checkpoint: one, or one per layer; none where positions are not tables."""
    spec = checkpoint.spec
    module = build_positional_embedding(spec.pos_emb, PositionOptions(spec))
    if not isinstance(module, TableEmbedding):
        return []
    per_layer = spec.kerple_share == "per_layer"
    prefixes: list[tuple[int | None, str]] = (
        [(n, f"{FIRST_LAYER + n}.positions.") for n in range(spec.num_layers)]
        if per_layer
        else [(None, "1.embedding.")]
    )
    return [_report(module, checkpoint, layer, prefix, longest) for layer, prefix in prefixes]


def _report(
    module: TableEmbedding, checkpoint: Checkpoint, layer: int | None, prefix: str, longest: int
) -> KernelReport:
    state = {
        name.removeprefix(prefix): tensor.float()
        for name, tensor in checkpoint.weights.items()
        if name.startswith(prefix)
    }
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{checkpoint.layout.directory}: its kernel does not fit its config ({reason})"
        ) from error
    with torch.no_grad():
        bias = module(longest + 1).bias
    lengths = effective_length(bias, longest) if bias is not None else []
    values = {name: value.tolist() for name, value in module.kernel_values().items()}
    return KernelReport(layer, values, lengths)


@dataclass(frozen=True)
class Difference:
    """One weight or config key in which two checkpoints differ."""

    name: str
    what: str
    size: float = math.inf


def compare(first: Checkpoint, second: Checkpoint) -> Iterator[Difference]:
    """Config keys, then weights: absent, of another shape, or of other values."""
    ours, theirs = first.args.to_dict(), second.args.to_dict()
    for key in sorted({*ours, *theirs}):
        if ours.get(key) != theirs.get(key):
            yield Difference(key, f"{ours.get(key)!r} | {theirs.get(key)!r}")
    for name in sorted({*first.weights, *second.weights}, key=split_name):
        a, b = first.weights.get(name), second.weights.get(name)
        if a is None or b is None:
            yield Difference(name, f"only in the {'second' if a is None else 'first'}")
        elif a.shape != b.shape:
            yield Difference(name, f"shape {tuple(a.shape)} | {tuple(b.shape)}")
        elif (largest := _largest_difference(a, b)) > 0:
            spread = float(a.float().std(correction=0))
            yield Difference(
                name, f"differs by up to {largest:.3g} (standard deviation {spread:.3g})", largest
            )


def _largest_difference(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().max()) if a.numel() else 0.0
