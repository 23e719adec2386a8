"""Copying a checkpoint's weights into a model; one error lists every mismatch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron.backends.interface import full_shape, gathered
from megatron.checkpoints.reading import Checkpoint, read_checkpoint
from megatron.checkpoints.saved_config import describe_difference, differences
from megatron.checkpoints.sharding import EMBEDDING, Sharding, canonical_names, with_rows
from megatron.errors import CheckpointError
from megatron.model import GPTModel, ModelSpec
from megatron.model.layer_list import FIRST_LAYER
from megatron.model.outline import outline_of, split_name
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
) -> Checkpoint:
    """Start `module` from any checkpoint's weights (not its optimizer); returns what was read.

    `module` is a GPTModel or a DeepSpeed PipelineModule of our layers, before DeepSpeed's engine
    takes it; for a pipeline give `spec` and `tp`. The checkpoint's model-parallel size does not
    matter. With `vocab_size` (the tokenizer's), paddings of the vocabulary may differ: rows of
    padding that the checkpoint lacks become zero.
    """
    if isinstance(module, GPTModel):
        spec, tp = module.spec, module.tp
    if spec is None:
        raise ValueError("load_weights needs `spec` for a module that is not a GPTModel")
    checkpoint = read_checkpoint(path, iteration=iteration)
    place_weights(module, checkpoint, spec, tp=tp or SERIAL, vocab_size=vocab_size)
    return checkpoint


def place_weights(
    module: nn.Module,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    *,
    tp: TensorParallel = SERIAL,
    vocab_size: int | None = None,
) -> None:
    """Copy whole tensors into a model's (share of the) parameters."""
    weights = _adapted(checkpoint, spec, vocab_size)
    sharding = Sharding.of(spec, neox=False)
    problems: list[str] = []
    ready: list[tuple[nn.Parameter, Tensor]] = []
    wanted = {name: parameter for parameter, name in canonical_names(module).items()}
    for name, parameter in wanted.items():
        whole = weights.get(name)
        if whole is None:
            problems.append(f"  {name} {tuple(full_shape(parameter))}: missing in the checkpoint")
            continue
        share = sharding.split(name, whole, tp.rank, tp.size)
        if share.shape != full_shape(parameter):
            problems.append(
                f"  {name}: {tuple(share.shape)} in the checkpoint, "
                f"{tuple(full_shape(parameter))} in the model"
            )
            continue
        ready.append((parameter, share))
    if isinstance(module, GPTModel):
        problems += [
            f"  {name} {tuple(weights[name].shape)}: not in the model"
            for name in sorted(set(weights) - set(wanted), key=split_name)
        ]
    if problems:
        raise CheckpointError(_misfits(checkpoint, spec, problems))
    with torch.no_grad():
        for parameter, share in ready:  # ZeRO 3 has cut up what it puts together in the block
            with gathered([parameter], write=True):
                parameter.copy_(share)


def _misfits(checkpoint: Checkpoint, spec: ModelSpec, problems: list[str]) -> str:
    found = differences(dict(checkpoint.spec), dict(spec), of_the_checkpoint)
    told = [describe_difference(key, *both) for key, both in found.items()]
    rows = checkpoint.padded_vocab_size, spec.padded_vocab_size
    if rows[0] != rows[1]:
        told.append(describe_difference("padded_vocab_size", *rows))
    hint = f" The configs differ: {'; '.join(told)}." if told else ""
    return (
        f"{checkpoint.files.directory}: {len(problems)} weights do not fit the model.{hint}\n"
        + "\n".join(problems)
    )


def _adapted(checkpoint: Checkpoint, spec: ModelSpec, vocab_size: int | None) -> dict[str, Tensor]:
    weights = with_constraint(checkpoint.weights, checkpoint.spec, spec.kerple_constraint)
    if spec.kerple_share == "per_layer" and checkpoint.spec.kerple_share == "all":
        for prefix, _, layers in outline_of(checkpoint.spec).kernels():
            for name in [name for name in weights if name.startswith(prefix)]:
                shared, parameter = weights.pop(name), name.removeprefix(prefix)
                for layer in layers:
                    weights[f"{FIRST_LAYER + layer}.positions.{parameter}"] = shared
    if vocab_size is not None:
        _adapt_vocabulary(weights, spec, vocab_size)
    return weights


def with_constraint(
    weights: Mapping[str, Tensor], spec: ModelSpec, constraint: str
) -> dict[str, Tensor]:
    """Constraints store the same value differently: a kernel as another would store it."""
    result = dict(weights)
    if constraint == spec.kerple_constraint:
        return result
    old, new = CONSTRAINTS[spec.kerple_constraint], CONSTRAINTS[constraint]
    for prefix, own, _ in outline_of(spec).kernels():
        cls = positional_embedding_class(own.pos_emb)
        for name, bounds in cls.learnable.items() if issubclass(cls, DistanceKernel) else ():
            raw = weights.get(f"{prefix}{name}")
            if raw is not None:
                with torch.no_grad():
                    result[f"{prefix}{name}"] = new.raw(old.value(raw.float(), bounds), bounds)
    return result


def _adapt_vocabulary(weights: dict[str, Tensor], spec: ModelSpec, vocab_size: int) -> None:
    head = f"{spec.num_layers + 4}.final_linear.weight"
    for name in (EMBEDDING, head):
        whole = weights.get(name)
        if whole is None or whole.shape[0] == spec.padded_vocab_size:
            continue
        if min(whole.shape[0], spec.padded_vocab_size) < vocab_size:
            continue  # real words would be lost: reported as a misfit
        weights[name] = with_rows(whole, spec.padded_vocab_size)
