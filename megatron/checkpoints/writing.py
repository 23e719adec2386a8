"""Writing DeepSpeed's layout: our own checkpoints, and GPT-NeoX's or the official KERPLE code's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megatron.checkpoints.checkpoint import Checkpoint
from megatron.checkpoints.errors import CheckpointError
from megatron.checkpoints.names import split_name
from megatron.checkpoints.neox_form import neox_config, neox_shard, neox_weights
from megatron.checkpoints.saved_config import RESOLVED
from megatron.checkpoints.sharding import Sharding, split_weights
from megatron.model.spec import ModelSpec
from megatron.neox_arguments import ConfigError

__all__ = ["cast_weights", "write_native", "write_neox"]

Shards = list[dict[str, Tensor]]


def cast_weights(weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Weights in another precision; kernel parameters stay fp32."""
    if dtype is None:
        return dict(weights)
    return {
        name: tensor.float() if _is_kernel(name) else tensor.to(dtype)
        for name, tensor in weights.items()
    }


def _is_kernel(name: str) -> bool:
    return split_name(name)[1].startswith(("embedding.", "positions."))


def write_native(
    checkpoint: Checkpoint,
    root: Path,
    *,
    mp: int = 1,
    pp: int = 0,
    dtype: torch.dtype | None = None,
) -> Path:
    """A checkpoint of ours in `root`; returns its directory.

    The config is the source's, with the new parallel sizes.
    """
    try:
        args = checkpoint.args.replace(model_parallel_size=mp, pipe_parallel_size=pp)
    except ConfigError as error:
        raise CheckpointError(f"--mp {mp} --pp {pp} does not suit this model: {error}") from error
    sharding = Sharding.of(ModelSpec.from_args(args, checkpoint.padded_vocab_size), neox=False)
    shards = split_weights(cast_weights(checkpoint.weights, dtype), sharding, mp)
    directory = _start(root, checkpoint.iteration)
    _write_shards(directory, shards, checkpoint.iteration, by_layer=pp >= 1)
    (directory / "configs" / RESOLVED).write_text(args.to_yaml(), encoding="utf-8")
    return directory


def write_neox(
    checkpoint: Checkpoint,
    root: Path,
    *,
    mp: int = 1,
    pp: int = 1,
    dtype: torch.dtype | None = None,
) -> Path:
    """A checkpoint that GPT-NeoX (or, for KERPLE kernels, the official code) loads."""
    spec = checkpoint.spec
    config = neox_config(checkpoint.args, spec, mp=mp, pp=pp)
    weights = neox_weights(cast_weights(checkpoint.weights, dtype), spec)
    shards = [
        neox_shard(shard, spec, rank, mp)
        for rank, shard in enumerate(split_weights(weights, Sharding.of(spec, neox=True), mp))
    ]
    directory = _start(root, checkpoint.iteration)
    _write_shards(directory, shards, checkpoint.iteration, by_layer=pp >= 1)
    text = yaml.safe_dump(config, sort_keys=False, default_flow_style=None)
    (directory / "configs" / "model.yml").write_text(text, encoding="utf-8")
    return directory


def _start(root: Path, iteration: int) -> Path:
    directory = root / f"global_step{iteration}"
    (directory / "configs").mkdir(parents=True)
    (root / "latest").write_text(directory.name, encoding="utf-8")
    return directory


def _write_shards(directory: Path, shards: Shards, iteration: int, *, by_layer: bool) -> None:
    for rank, shard in enumerate(shards):
        module = None
        if by_layer:
            for layer in sorted({split_name(name)[0] for name in shard}):
                content = {
                    split_name(name)[1]: _own(tensor)
                    for name, tensor in shard.items()
                    if split_name(name)[0] == layer
                }
                path = directory / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"
                torch.save(content, path)
        else:
            module = {f"sequential.{name}": _own(tensor) for name, tensor in shard.items()}
        state = _training_state(module, iteration, len(shards))
        torch.save(state, directory / f"mp_rank_{rank:02d}_model_states.pt")


def _own(tensor: Tensor) -> Tensor:
    """A tensor with storage of its own: a view would write the whole it was cut from."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _training_state(module: Any, iteration: int, mp: int) -> dict[str, Any]:
    """What DeepSpeed looks for; there is no optimizer: training starts with fresh moments."""
    return {
        "module": module,
        "optimizer": None,
        "lr_scheduler": None,
        "sparse_tensor_module_names": [],
        "csr_tensor_module_names": [],
        "skipped_steps": 0,
        "global_steps": iteration,
        "global_samples": 0,
        "dp_world_size": 1,
        "mp_world_size": mp,
        "iteration": iteration,
        "consumed_samples": 0,
    }
