"""The facts of a checkpoint, its kernels, and the differences between two checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoints.reading import Checkpoint, CheckpointFiles
from megatron.checkpoints.safe_files import load_mapping
from megatron.errors import CheckpointError
from megatron.model.kernel_theory import effective_length
from megatron.model.outline import is_of_kernel, outline_of, split_name
from megatron.model.position_base import PositionOptions, TableEmbedding
from megatron.model.position_names import build_positional_embedding


def describe(checkpoint: Checkpoint) -> dict[str, object]:
    """Facts about a checkpoint as plain data."""
    files, spec = checkpoint.files, checkpoint.spec
    sizes = [path.stat().st_size for path in files.directory.rglob("*") if path.is_file()]
    return {
        "path": str(files.directory),
        "kind": checkpoint.kind,
        "iteration": checkpoint.iteration,
        "files": len(sizes),
        "bytes": sum(sizes),
        "model_parallel_size": 1 if files.is_hf else files.mp_size,
        "layout": _layout_name(files),
        "optimizer_states": _has_optimizer(files),
        "pos_emb": spec.pos_emb,
        **({"layer_pattern": spec.layer_pattern} if spec.layer_pattern is not None else {}),
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
            tensor.numel() for name, tensor in checkpoint.weights.items() if is_of_kernel(name)
        ),
        "dtypes": sorted(
            {str(t.dtype).removeprefix("torch.") for t in checkpoint.weights.values()}
        ),
        "non_finite": [n for n, t in checkpoint.weights.items() if not bool(t.isfinite().all())],
        "config_hash": checkpoint.args.config_hash(),
    }


def _has_optimizer(files: CheckpointFiles) -> bool:
    """Whether it holds optimizer states: in ZeRO's shards, or beside the weights without ZeRO."""
    if files.zero_optimizer_files or files.is_universal:
        return True
    state = load_mapping(min(files.mp_files.values())) if files.mp_files else {}
    return bool(state.get("optimizer"))


def _layout_name(files: CheckpointFiles) -> str:
    if files.is_hf:
        return "Hugging Face folder"
    if files.is_universal:
        return "universal: one folder per parameter"
    if files.is_zero3:
        return "ZeRO stage 3 partitions"
    return "one file per layer" if files.layer_files else "one file per model-parallel rank"


def kernel_of(checkpoint: Checkpoint, longest: int = 20480) -> list[dict[str, Any]]:
    """The kernels of a checkpoint: one, or one per layer; none where positions are not tables.

    Each with its values per head and each head's effective length (None: beyond `longest`).
    `layer` is the one that has it, None if layers share it; with a layer_pattern, `layers` lists
    those that share it and `pos_emb` is its method.
    """
    spec, found = checkpoint.spec, []
    for prefix, own, layers in outline_of(spec).kernels():
        module = build_positional_embedding(own.pos_emb, PositionOptions(own))
        assert isinstance(module, TableEmbedding)
        where: dict[str, Any] = {"layer": layers[0] if spec.kerple_share == "per_layer" else None}
        if spec.layer_pattern is not None:
            where |= {"layers": list(layers), "pos_emb": own.pos_emb}
        found.append({**where, **_report(module, checkpoint, prefix, longest)})
    return found


def _report(
    module: TableEmbedding, checkpoint: Checkpoint, prefix: str, longest: int
) -> dict[str, Any]:
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
            f"{checkpoint.files.directory}: its kernel does not fit its config ({reason})"
        ) from error
    with torch.no_grad():
        bias = module(longest + 1).bias
    return {
        "values": {name: value.tolist() for name, value in module.kernel_values().items()},
        "effective_lengths": effective_length(bias, longest) if bias is not None else [],
    }


def compare(first: Checkpoint, second: Checkpoint) -> Iterator[dict[str, Any]]:
    """Config keys, then weights: absent, of another shape, or of other values."""
    ours, theirs = first.args.to_dict(), second.args.to_dict()
    for key in sorted({*ours, *theirs}):
        if ours.get(key) != theirs.get(key):
            what = f"{ours.get(key)!r} | {theirs.get(key)!r}"
            yield {"name": key, "what": what, "size": None}
    for name in sorted({*first.weights, *second.weights}, key=split_name):
        a, b = first.weights.get(name), second.weights.get(name)
        size = None
        if a is None or b is None:
            what = f"only in the {'second' if a is None else 'first'}"
        elif a.shape != b.shape:
            what = f"shape {tuple(a.shape)} | {tuple(b.shape)}"
        else:
            size = _distance(a.float(), b.float())
            spread = float(a.float().std(correction=0))
            what = f"differs by up to {size:.3g} (standard deviation {spread:.3g})"
        if size != 0:
            yield {"name": name, "what": what, "size": size}


def without_nonfinite(value: Any) -> Any:
    """The same report with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _distance(a: Tensor, b: Tensor) -> float:
    """The largest difference; NaN where one of two numbers is NaN."""
    same = (a == b) | (a.isnan() & b.isnan())
    return float((a - b).abs().masked_fill(same, 0.0).max()) if a.numel() else 0.0
