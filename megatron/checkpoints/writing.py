"""Writing DeepSpeed's layout: our own checkpoints, and GPT-NeoX's or the official KERPLE code's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megatron.checkpoints.lazy_weights import changed
from megatron.checkpoints.placing import with_constraint
from megatron.checkpoints.reading import Checkpoint
from megatron.checkpoints.safe_files import synced_save
from megatron.checkpoints.saved_config import RESOLVED
from megatron.checkpoints.sharding import Sharding, neox_shard
from megatron.checkpoints.store import Sums, write_checksums
from megatron.errors import CheckpointError, ConfigError
from megatron.model.outline import is_of_kernel, outline_of, split_name
from megatron.neox_arguments import OWNER
from megatron.neox_arguments.catalogue import method
from megatron.neox_arguments.model_keys import KEYS_OF_OURS, SCORE_TERMS, ModelArgs

Shard = Callable[[Collection[int], int], Mapping[str, Tensor]]
"""Gives the weights of some layers on one model-parallel rank."""


def cast_weights(checkpoint: Checkpoint, dtype: torch.dtype | None) -> Mapping[str, Tensor]:
    """Weights in another precision, but for those that are kept in fp32."""
    if dtype is None:
        return checkpoint.weights
    outline = outline_of(checkpoint.args.model)
    return changed(
        checkpoint.weights,
        lambda name, tensor: tensor.float() if outline.facts(name).fp32 else tensor.to(dtype),
    )


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
    weights = cast_weights(checkpoint, dtype)
    files = _files(by_layer=pp >= 1, indices=sorted({split_name(name)[0] for name in weights}))

    def shard(indices: Collection[int], rank: int) -> dict[str, Tensor]:
        return {
            name: sharding.split(name, weights[name], rank, mp)
            for name in weights
            if split_name(name)[0] in indices
        }

    return _write(root, shard, files, mp, checkpoint.iteration, RESOLVED, args.to_yaml())


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
    sharding, head = Sharding.of(spec, neox=True), spec.num_layers + 4
    indices = {split_name(name)[0] for name in weights} - {1} | {head}

    def shard(indices: Collection[int], rank: int) -> dict[str, Tensor]:
        # the kernel is in every layer's file, the embedding once more in a tied head's
        read = {1, 0, *indices} if head in indices else {1, *indices}
        parts = {
            name: sharding.split(name, weights[name], rank, mp)
            for name in weights
            if split_name(name)[0] in read
        }
        theirs = neox_shard(parts, spec, rank, mp)
        return {name: part for name, part in theirs.items() if split_name(name)[0] in indices}

    text = yaml.safe_dump(config, sort_keys=False, default_flow_style=None)
    files = _files(by_layer=pp >= 1, indices=sorted(indices))
    return _write(root, shard, files, mp, checkpoint.iteration, "model.yml", text)


def _files(*, by_layer: bool, indices: list[int]) -> list[list[int]]:
    """The layers in each file: one a file, which needs the memory of one, or all in one."""
    return [[index] for index in indices] if by_layer else [indices]


def _write(
    root: Path,
    shard: Shard,
    files: list[list[int]],
    mp: int,
    iteration: int,
    config: str,
    text: str,
) -> Path:
    directory = root / f"global_step{iteration}"
    (directory / "configs").mkdir(parents=True)
    (root / "latest").write_text(directory.name, encoding="utf-8")
    sums = _write_shards(directory, shard, files, mp, iteration)
    (directory / "configs" / config).write_text(text, encoding="utf-8")
    write_checksums(directory, sums)
    return directory


def _write_shards(
    directory: Path, shard: Shard, files: list[list[int]], mp: int, iteration: int
) -> Sums:
    sums: Sums = {}
    for rank in range(mp):
        module = None
        if len(files) == 1:
            module = {
                f"sequential.{name}": _own(part) for name, part in shard(files[0], rank).items()
            }
        else:
            for layers in files:
                content = {split_name(n)[1]: _own(part) for n, part in shard(layers, rank).items()}
                name = f"layer_{layers[0]:02d}-model_{rank:02d}-model_states.pt"
                sums[name] = synced_save(content, directory / name)
        state = _training_state(module, iteration, mp)
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
    lacking = [
        key for key in SCORE_TERMS if getattr(spec, key) != ModelArgs.model_fields[key].default
    ]
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
