"""Writing DeepSpeed's layout: our own checkpoints, and GPT-NeoX's or the official KERPLE code's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megatron.checkpoints.placing import with_constraint
from megatron.checkpoints.reading import Checkpoint
from megatron.checkpoints.safe_files import synced_save
from megatron.checkpoints.saved_config import RESOLVED
from megatron.checkpoints.sharding import Sharding, neox_shard, split_weights
from megatron.checkpoints.store import Sums, write_checksums
from megatron.errors import CheckpointError, ConfigError
from megatron.model.outline import is_of_kernel, outline_of, split_name
from megatron.neox_arguments import OWNER
from megatron.neox_arguments.catalogue import method
from megatron.neox_arguments.model_keys import KEYS_OF_OURS, SCORE_TERMS

Shards = list[dict[str, Tensor]]


def cast_weights(checkpoint: Checkpoint, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Weights in another precision, but for those that are kept in fp32."""
    if dtype is None:
        return dict(checkpoint.weights)
    outline = outline_of(checkpoint.args.model)
    return {
        name: tensor.float() if outline.facts(name).fp32 else tensor.to(dtype)
        for name, tensor in checkpoint.weights.items()
    }


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
    sharding = Sharding.of(args.model, neox=False)
    shards = split_weights(cast_weights(checkpoint, dtype), sharding, mp)
    return _write(root, shards, checkpoint.iteration, RESOLVED, args.to_yaml(), by_layer=pp >= 1)


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
    config = neox_config(checkpoint, mp=mp, pp=pp)
    # The official code clamps its kernel's values, which is our `ste`.
    weights = with_constraint(cast_weights(checkpoint, dtype), spec, "ste")
    shards = [
        neox_shard(shard, spec, rank, mp)
        for rank, shard in enumerate(split_weights(weights, Sharding.of(spec, neox=True), mp))
    ]
    text = yaml.safe_dump(config, sort_keys=False, default_flow_style=None)
    return _write(root, shards, checkpoint.iteration, "model.yml", text, by_layer=pp >= 1)


def _write(
    root: Path, shards: Shards, iteration: int, config: str, text: str, *, by_layer: bool
) -> Path:
    directory = root / f"global_step{iteration}"
    (directory / "configs").mkdir(parents=True)
    (root / "latest").write_text(directory.name, encoding="utf-8")
    sums = _write_shards(directory, shards, iteration, by_layer=by_layer)
    (directory / "configs" / config).write_text(text, encoding="utf-8")
    write_checksums(directory, sums)
    return directory


def _write_shards(directory: Path, shards: Shards, iteration: int, *, by_layer: bool) -> Sums:
    sums: Sums = {}
    for rank, shard in enumerate(shards):
        module = None
        if by_layer:
            for layer in sorted({split_name(name)[0] for name in shard}):
                content = {
                    split_name(name)[1]: _own(tensor)
                    for name, tensor in shard.items()
                    if split_name(name)[0] == layer
                }
                name = f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"
                sums[name] = synced_save(content, directory / name)
        else:
            module = {f"sequential.{name}": _own(tensor) for name, tensor in shard.items()}
        state = _training_state(module, iteration, len(shards))
        name = f"mp_rank_{rank:02d}_model_states.pt"
        sums[name] = synced_save(state, directory / name)
    return sums


def _own(tensor: Tensor) -> Tensor:
    """A tensor with storage of its own: a view would write the whole it was cut from."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _training_state(module: Any, iteration: int, mp: int) -> dict[str, Any]:
    """The fields that DeepSpeed reads; without an optimizer, training starts with new moments."""
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


# Our config in the terms of GPT-NeoX, or of the official KERPLE code for its kernels.

_GROUPS = ("model", "parallel", "optimization", "tokenizer", "runtime")
_NOT_THEIRS = KEYS_OF_OURS | {
    "max_consecutive_nonfinite",
    "distributed_timeout_minutes",
    "detect_anomaly",
    "deepspeed_extra_args",
    "vocab_size",
    "seq_length_val",
    "activation_checkpointing",
}


def neox_config(checkpoint: Checkpoint, *, mp: int, pp: int) -> dict[str, Any]:
    """The YAML to keep beside the weights; an error for features that the other code lacks."""
    spec = checkpoint.spec
    known = method(spec.pos_emb)
    lacking = [key for key in SCORE_TERMS if getattr(spec, key)]
    if known is None or not (known.in_neox or known.official):
        lacking.append(f"pos_emb: {spec.pos_emb}")
    elif known.official:  # older than these keys of GPT-NeoX
        newer = [key for key in ("num_kv_heads", "use_qk_layernorm") if getattr(spec, key)]
        lacking += [f"pos_emb: {spec.pos_emb} with {key}" for key in newer]
        if spec.kerple_bias_scale == "pre":
            lacking.append("kerple_bias_scale: pre")
    if any(is_of_kernel(name) and not name.startswith("1.") for name in checkpoint.weights):
        lacking.append("kerple_share: per_layer")
    if lacking:
        raise CheckpointError(
            f"neither GPT-NeoX nor the official KERPLE code has {', '.join(lacking)}; "
            "convert to native or hf instead"
        )
    flat = checkpoint.args.replace(model_parallel_size=mp, pipe_parallel_size=pp).to_dict()
    config = {
        key: value
        for key, value in flat.items()
        if OWNER[key] in _GROUPS and key not in _NOT_THEIRS
    }
    assert known is not None
    config["pos_emb"] = known.official or known.name
    return config
