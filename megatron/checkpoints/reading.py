"""Reading any checkpoint into one form: whole tensors under canonical names, with its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoints.layouts import Layout, open_layout
from megatron.checkpoints.safe_files import load_mapping
from megatron.checkpoints.saved_config import args_from, is_ours, read_saved_config
from megatron.checkpoints.sharding import Sharding, merge_shards
from megatron.checkpoints.universal import read_weights
from megatron.checkpoints.weight_names import (
    FIRST_LAYER,
    canonical_shard,
    share_positions,
    split_name,
    strip_prefix,
)
from megatron.errors import CheckpointError
from megatron.model.spec import ModelSpec
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.model_keys import GATED_ACTIVATIONS, intermediate_size_for

__all__ = ["Checkpoint", "read_checkpoint"]

EMBEDDING = "0.word_embeddings.weight"


@dataclass(frozen=True)
class Checkpoint:
    """A model at rest."""

    weights: dict[str, Tensor]
    args: NeoXArgs
    layout: Layout
    kind: str
    """native, kerple (the official code), neox, or hf."""
    iteration: int

    @property
    def padded_vocab_size(self) -> int:
        """From the weights: the config alone may give another."""
        return self.weights[EMBEDDING].shape[0]

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec.from_args(self.args, self.padded_vocab_size)

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.weights.values())


def read_checkpoint(
    path: str | Path,
    *,
    iteration: int | None = None,
    config: NeoXArgs | Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Any checkpoint: ours, official KERPLE, GPT-NeoX (both generations), or Hugging Face."""
    layout = open_layout(path, iteration)
    if layout.is_hf:
        from megatron.checkpoints.hf.folder import read_hf_checkpoint

        return read_hf_checkpoint(layout)
    args, native = _config_of(layout, config)
    shards = [
        canonical_shard(
            shard,
            pos_emb=args.model.pos_emb,
            num_layers=args.model.num_layers,
            tied=not args.model.no_weight_tying,
        )
        for shard in _read_shards(layout)
    ]
    sharding = _sharding(args, shards, native=native)
    weights = merge_shards(shards, sharding)
    if EMBEDDING not in weights:
        raise CheckpointError(f"{layout.directory}: holds no word_embeddings.weight at layer 0")
    if not (native and args.model.kerple_share == "per_layer"):
        weights, args = _shared(weights, args)
    if not native:
        args = _as_wide_as_its_blocks(weights, args)
    kind = "native" if native else "kerple" if "kerple" in args.model.pos_emb else "neox"
    return Checkpoint(weights, args, layout, kind, _iteration(layout))


def _config_of(
    layout: Layout, config: NeoXArgs | Mapping[str, Any] | None
) -> tuple[NeoXArgs, bool]:
    """The config to use, and whether this code wrote the checkpoint.

    Who wrote the files is told by what lies beside them, not by a config handed in.
    """
    try:
        saved = read_saved_config(layout)
    except CheckpointError:
        if config is None:
            raise
        saved = {}
    args = args_from(saved if config is None else config, layout.directory)
    return args, is_ours(saved)


def _sharding(args: NeoXArgs, shards: list[dict[str, Tensor]], *, native: bool) -> Sharding:
    """The cuts; the head's is told by its shape, for the two generations' defaults differ."""
    sharding = Sharding.of(args.model, neox=not native)
    head = shards[0].get(f"{args.model.num_layers + 4}.final_linear.weight")
    if head is None or len(shards) == 1:
        return sharding
    hidden = args.model.hidden_size
    columns = {hidden: "column", hidden // len(shards): "row"}
    return replace(sharding, head=columns.get(head.shape[-1], sharding.head))


def _shared(weights: dict[str, Tensor], args: NeoXArgs) -> tuple[dict[str, Tensor], NeoXArgs]:
    weights = share_positions(weights)
    per_layer = any(split_name(name)[1].startswith("positions.") for name in weights)
    share = "per_layer" if per_layer else "all"
    return weights, args if args.model.kerple_share == share else args.replace(kerple_share=share)


def _as_wide_as_its_blocks(weights: dict[str, Tensor], args: NeoXArgs) -> NeoXArgs:
    """GPT-NeoX has had several rules for the width of gated MLPs: the weights tell it."""
    last = weights.get(f"{FIRST_LAYER}.mlp.dense_4h_to_h.weight")
    activation = args.model.activation
    if last is None or activation not in GATED_ACTIVATIONS or last.shape[1] == args.model.ffn_size:
        return args
    size = intermediate_size_for(last.shape[1], activation)
    return args.replace(intermediate_size=size, mlp_multiple_of=1)


def _read_shards(layout: Layout) -> list[dict[str, Tensor]]:
    """Each model-parallel rank's tensors, named `<index>.<name>`."""
    if layout.is_universal:
        return [read_weights(layout.directory)]
    if layout.is_zero3:
        from megatron.checkpoints.zero3 import read_zero3_shards

        return read_zero3_shards(layout)
    if layout.layer_files:
        return [_read_layers(layout, rank) for rank in range(layout.mp_size)]
    return [_read_mp_file(layout.mp_files[rank]) for rank in range(layout.mp_size)]


def _read_layers(layout: Layout, rank: int) -> dict[str, Tensor]:
    return {
        f"{layer}.{name}": tensor
        for (layer, shard), path in layout.layer_files.items()
        if shard == rank
        for name, tensor in load_mapping(path).items()
        if isinstance(tensor, Tensor)
    }


def _read_mp_file(path: Path) -> dict[str, Tensor]:
    module = load_mapping(path).get("module")
    if not isinstance(module, dict):
        raise CheckpointError(f"{path}: holds no weights under `module`")
    return {
        strip_prefix(name, path): tensor
        for name, tensor in module.items()
        if isinstance(tensor, Tensor)
    }


def _iteration(layout: Layout) -> int:
    if layout.step_in_name is not None:
        return layout.step_in_name
    if layout.mp_files:
        state = load_mapping(layout.mp_files[min(layout.mp_files)])
        step = state.get("iteration", state.get("global_steps", 0))
        return int(step) if isinstance(step, int) else 0
    return 0
