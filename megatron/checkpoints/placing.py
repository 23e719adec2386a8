"""Copying a checkpoint's weights into a model; one error lists every mismatch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron.backends.interface import full_shape, gathered
from megatron.checkpoints.lazy_weights import outlines, replaced
from megatron.checkpoints.reading import Checkpoint, read_checkpoint
from megatron.checkpoints.saved_config import (
    check_positions,
    describe_difference,
    differences,
)
from megatron.checkpoints.sharding import EMBEDDING, Sharding, canonical_names, with_rows
from megatron.errors import CheckpointError
from megatron.model import GPTModel, ModelSpec
from megatron.model.layer_list import FIRST_LAYER
from megatron.model.outline import is_of_positions, outline_of, split_name
from megatron.model.position_base import CONSTRAINTS, DistanceKernel
from megatron.model.position_names import positional_embedding_class
from megatron.mpu.collectives import SERIAL, TensorParallel
from megatron.neox_arguments import of_the_checkpoint


def load_weights(
    module: nn.Module,
    path: str | Path,
    *,
    iteration: int | None = None,
    spec: ModelSpec | None = None,
    tp: TensorParallel | None = None,
    vocab_size: int | None = None,
    fresh_positions: bool = False,
) -> Checkpoint:
    """Start `module` from any checkpoint's weights (not its optimizer); returns what was read.

    `module` is a GPTModel or a DeepSpeed PipelineModule of our layers, before DeepSpeed's engine
    takes it; for a pipeline give `spec` and `tp`. The checkpoint's model-parallel size does not
    matter. With `vocab_size` (the tokenizer's), paddings of the vocabulary may differ: rows of
    padding that the checkpoint lacks become zero. With `fresh_positions` its positions may be of
    another method, and those of the module stay as they are.
    """
    if isinstance(module, GPTModel):
        spec, tp = module.spec, module.tp
    if spec is None:
        raise ValueError("load_weights needs `spec` for a module that is not a GPTModel")
    checkpoint = read_checkpoint(path, iteration=iteration)
    if not fresh_positions:
        check_positions(checkpoint.args.model, spec, checkpoint.files.directory)
    place_weights(
        module,
        checkpoint,
        spec,
        tp=tp or SERIAL,
        vocab_size=vocab_size,
        fresh_positions=fresh_positions,
    )
    return checkpoint


def place_weights(
    module: nn.Module,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    *,
    tp: TensorParallel = SERIAL,
    vocab_size: int | None = None,
    fresh_positions: bool = False,
) -> None:
    """Copy whole tensors into a model's (share of the) parameters."""
    weights = _adapted(checkpoint, spec, vocab_size)
    if fresh_positions:
        weights = replaced(weights, {}, [name for name in weights if is_of_positions(name)])
    sharding = Sharding.of(spec, neox=False)
    problems: list[str] = []
    shapes = outlines(weights)
    wanted = {
        name: parameter
        for parameter, name in canonical_names(module).items()
        if not (fresh_positions and is_of_positions(name))
    }
    for name, parameter in wanted.items():
        if name not in shapes:
            problems.append(f"  {name} {tuple(full_shape(parameter))}: missing in the checkpoint")
            continue
        share = sharding.split(name, shapes[name], tp.rank, tp.size)
        if share.shape != full_shape(parameter):
            problems.append(
                f"  {name}: {tuple(share.shape)} in the checkpoint, "
                f"{tuple(full_shape(parameter))} in the model"
            )
    if isinstance(module, GPTModel):
        problems += [
            f"  {name} {tuple(shapes[name].shape)}: not in the model"
            for name in sorted(set(weights) - set(wanted), key=split_name)
        ]
    if problems:
        raise CheckpointError(_misfits(checkpoint, spec, problems))
    with torch.no_grad():
        for name, parameter in wanted.items():
            share = sharding.split(name, weights[name], tp.rank, tp.size)
            # ZeRO 3 has cut up what it puts together in the block
            with gathered([parameter], write=True):
                parameter.copy_(share)


def _misfits(checkpoint: Checkpoint, spec: ModelSpec, problems: list[str]) -> str:
    found = differences(dict(checkpoint.spec), dict(spec), of_the_checkpoint)
    differing = [describe_difference(key, *both) for key, both in found.items()]
    rows = checkpoint.padded_vocab_size, spec.padded_vocab_size
    if rows[0] != rows[1]:
        differing.append(describe_difference("padded_vocab_size", *rows))
    hint = f" The configs differ: {'; '.join(differing)}." if differing else ""
    return (
        f"{checkpoint.files.directory}: {len(problems)} weights do not fit the model.{hint}\n"
        + "\n".join(problems)
    )


def _adapted(
    checkpoint: Checkpoint, spec: ModelSpec, vocab_size: int | None
) -> Mapping[str, Tensor]:
    weights = with_constraint(checkpoint.weights, checkpoint.spec, spec.kerple_constraint)
    if spec.kerple_share == "per_layer" and checkpoint.spec.kerple_share == "all":
        copies: dict[str, Tensor] = {}
        dropped: list[str] = []
        for prefix, _, layers in outline_of(checkpoint.spec).kernels():
            for name in [name for name in weights if name.startswith(prefix)]:
                dropped.append(name)
                shared, parameter = weights[name], name.removeprefix(prefix)
                for layer in layers:
                    copies[f"{FIRST_LAYER + layer}.positions.{parameter}"] = shared
        weights = replaced(weights, copies, dropped)
    if vocab_size is None:
        return weights
    return replaced(weights, _other_vocabulary(weights, spec, vocab_size))


def with_constraint(
    weights: Mapping[str, Tensor], spec: ModelSpec, constraint: str
) -> Mapping[str, Tensor]:
    """Constraints store the same value differently: a kernel as another would store it."""
    if constraint == spec.kerple_constraint:
        return weights
    result: dict[str, Tensor] = {}
    old, new = CONSTRAINTS[spec.kerple_constraint], CONSTRAINTS[constraint]
    for prefix, own, _ in outline_of(spec).kernels():
        cls = positional_embedding_class(own.pos_emb)
        for name, bounds in cls.learnable.items() if issubclass(cls, DistanceKernel) else ():
            raw = weights.get(f"{prefix}{name}")
            if raw is not None:
                with torch.no_grad():
                    result[f"{prefix}{name}"] = new.raw(old.value(raw.float(), bounds), bounds)
    return replaced(weights, result)


def _other_vocabulary(
    weights: Mapping[str, Tensor], spec: ModelSpec, vocab_size: int
) -> dict[str, Tensor]:
    shapes, found = outlines(weights), {}
    for name in (EMBEDDING, f"{spec.num_layers + 4}.final_linear.weight"):
        if name not in shapes or shapes[name].shape[0] == spec.padded_vocab_size:
            continue
        if min(shapes[name].shape[0], spec.padded_vocab_size) < vocab_size:
            continue  # real words would be lost: reported as a misfit
        found[name] = with_rows(weights[name], spec.padded_vocab_size)
    return found
