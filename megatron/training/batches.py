"""Endless iterators of micro-batches for training, validation and test."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from megatron.backends.interface import MicroBatch
from megatron.checkpoints.resuming import Resumed
from megatron.data.datasets import build_datasets, check_documents_end, sample_counts
from megatron.data.loader import (
    ResumableBatchSampler,
    build_data_loader,
    document_starts,
    drawn_positions,
    get_labels_and_mask,
)
from megatron.errors import ConfigError, DataError
from megatron.model import ModelSpec
from megatron.mpu.collectives import ParallelState
from megatron.mpu.job import current_device
from megatron.neox_arguments import BatchPlan, NeoXArgs
from megatron.neox_arguments.model_keys import ModelArgs
from megatron.neox_arguments.run_keys import DataArgs, EvaluationArgs
from megatron.training.trainer import Stream

Counts = tuple[int, int, int] | None
"""Samples of train, valid and test; None: one pass over each."""


def build_streams(
    args: NeoXArgs,
    spec: ModelSpec,
    plan: BatchPlan,
    parallel: ParallelState,
    *,
    eod: int,
    start: Resumed,
) -> tuple[Stream, Stream, Stream]:
    """Training data after the consumed samples; validation and test at the matching position."""
    by_epochs = args.optimization.train_epochs is not None

    def stream(dataset: Any, consumed: int, *, wrap: bool, workers: int = 0) -> Stream:
        if dataset is None or len(dataset) == 0:
            return None
        sampler = ResumableBatchSampler(
            total_samples=(by_epochs and _whole_batches(dataset, plan)) or len(dataset),
            consumed_samples=consumed,
            micro_batch_size=plan.micro_batch_size,
            dp_rank=parallel.data_rank,
            dp_size=parallel.data_size,
            grad_accum=plan.gradient_accumulation_steps,
            wrap=wrap,
        )
        loader = build_data_loader(
            dataset,
            sampler,
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
            seed=spec.seed,
        )
        places = _places(spec, sampler) if dataset is train else None
        return _micro_batches(loader, current_device(), eod, args.data, places)

    train, valid, test = _datasets(args, spec, plan, start, eod)
    evaluations_done = start.step // args.evaluation.eval_interval
    validated = evaluations_done * args.evaluation.eval_iters * plan.train_batch_size
    return (
        stream(train, start.consumed_samples, wrap=by_epochs, workers=args.data.num_workers),
        stream(valid, validated, wrap=True),
        stream(test, 0, wrap=True),
    )


def _whole_batches(dataset: Any, plan: BatchPlan) -> int:
    """The samples of one pass in batches of all ranks; as in GPT-NeoX the rest is left out."""
    batch = plan.micro_batch_size * plan.data_parallel_size
    return len(dataset) // batch * batch


def with_steps_of_epochs(args: NeoXArgs, world_size: int) -> NeoXArgs:
    """`train_epochs` as train_iters: the whole steps in so many passes over the training data."""
    options = args.optimization
    if options.train_epochs is None or args.evaluation.do_train is False:
        return args
    plan = args.batch_plan(world_size)
    train = _build(args.data, args.model, args.runtime.seed)[0]
    samples = 0 if train is None else _whole_batches(train, plan) * options.train_epochs
    steps = samples // plan.train_batch_size
    if not steps:
        raise DataError(
            f"train_epochs = {options.train_epochs} is less than one step of "
            f"{plan.train_batch_size} samples. Use more text, or a smaller train_batch_size."
        )
    if options.train_iters not in (None, steps):
        raise ConfigError(
            f"train_epochs = {options.train_epochs} is {steps} steps on this data, and train_iters "
            f"is {options.train_iters}. Keep one of them."
        )
    return args.replace(train_iters=steps)


def first_tokens(data: DataArgs, spec: ModelSpec, sequences: int) -> torch.Tensor:
    """So many sequences of the training data, [B, L], the same on every rank."""
    train = _build(data, spec, spec.seed, (sequences, 0, 0), spec.padded_vocab_size)[0]
    if train is None:
        raise DataError("kerple_init = fit needs training data: set data_path or train_data_paths.")
    texts = [torch.as_tensor(train[i % len(train)]["text"]) for i in range(sequences)]
    return torch.stack(texts)[:, :-1].long()


def _datasets(
    args: NeoXArgs, spec: ModelSpec, plan: BatchPlan, start: Resumed, eod: int
) -> tuple[Any, Any, Any]:
    options, batch = args.optimization, plan.train_batch_size
    counts: Counts = None
    if options.train_epochs is None:
        counts = _sample_counts(options.train_iters or 0, args.evaluation, batch, start)
    datasets = _build(args.data, spec, spec.seed, counts, spec.padded_vocab_size)
    train, length, steps = datasets[0], spec.seq_length, args.steps_to_train
    if train is not None:
        _check_enough(train, length)
        if args.data.tells_documents_apart:
            check_documents_end(train, eod)
    elif steps:
        raise DataError(
            "no documents to train on: set train_data_paths, or data_path with a first share in "
            f'split (now "{args.data.split}").'
        )
    if steps and dist.get_rank() == 0:
        print(_amount(train, steps * batch * length))
    return datasets


def _build(
    data: DataArgs, model: ModelArgs, seed: int, counts: Counts = None, vocab: int | None = None
) -> tuple[Any, Any, Any]:
    return build_datasets(
        data,
        seq_length=model.seq_length,
        seq_length_val=model.seq_length_val,
        num_samples=counts,
        seed=seed if data.data_seed is None else data.data_seed,
        vocab_size=vocab,
    )


def _check_enough(train: Any, length: int) -> None:
    """Refuse a corpus shorter than one sequence, which would repeat within a sample."""
    tokens = tokens_of(train)
    if tokens is not None and tokens <= length and not _documents_of(train):
        raise DataError(
            f"the train split holds {tokens} tokens, too few for one sequence of seq_length = "
            f"{length}. Use more text, a larger share in split, or a shorter seq_length."
        )


def _amount(train: Any, tokens_seen: int) -> str:
    """The number of tokens and of epochs."""
    tokens = tokens_of(train)
    if documents := _documents_of(train):
        return f"data: {tokens or 0:,} training tokens in {documents:,} documents with loss"
    if tokens is None:
        return f"data: {tokens_seen:,} tokens to train on"
    epochs = tokens_seen / tokens
    passes = f"{epochs:,.1f} times" if epochs >= 1 else f"{epochs:.0%} of it"
    return f"data: {tokens:,} training tokens; the run reads {tokens_seen:,}: {passes}"


def tokens_of(dataset: Any) -> int | None:
    """Distinct tokens of a dataset; None if it does not record them."""
    parts = getattr(dataset, "datasets", [dataset])
    counts = [getattr(part, "tokens_per_epoch", None) for part in parts]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _documents_of(dataset: Any) -> int:
    """Documents that are kept whole (`pack_impl`); 0 if they are cut into one stream."""
    parts = getattr(dataset, "datasets", [dataset])
    return sum(getattr(part, "usable_documents", 0) for part in parts)


def _sample_counts(
    iterations: int, evaluation: EvaluationArgs, batch: int, start: Resumed
) -> tuple[int, int, int]:
    """How many samples each split must have; the batch size may have changed during the run."""
    train, valid, test = sample_counts(
        iterations, evaluation.eval_interval, evaluation.eval_iters, batch
    )
    if start.step <= iterations:
        train = start.samples_at(iterations, batch)
    return train, valid, test


def _places(spec: ModelSpec, sampler: ResumableBatchSampler) -> Iterator[torch.Tensor] | None:
    """The drawn positions of this rank's micro-batches, [B, L]; None without the key."""
    most, batch = spec.randomized_positions, sampler.micro_batch_size
    if most is None:
        return None
    draw = partial(drawn_positions, spec.seed, length=spec.seq_length, most=most)
    first = count(sampler.consumed_samples + sampler.dp_rank * batch, sampler.dp_size * batch)
    return (torch.stack([draw(number + i) for i in range(batch)]) for number in first)


def _micro_batches(
    loader: Iterable[dict[str, torch.Tensor]],
    device: torch.device,
    eod: int,
    data: DataArgs,
    places: Iterator[torch.Tensor] | None = None,
) -> Iterator[MicroBatch]:
    """Text is copied to the device asynchronously from pinned memory, then split there.

    Positions that are not consecutive are told as those of documents are: by the place of a
    position 0.
    """
    masks_ends = data.eod_mask_loss or data.reset_attention_mask
    gives_starts = data.tells_documents_apart
    for batch in loader:
        found = {key: value.to(device, non_blocking=True) for key, value in batch.items()}
        tokens, labels, mask = get_labels_and_mask(
            found["text"], eod, masks_ends, found.get("label")
        )
        if gives_starts:
            yield (tokens, document_starts(tokens, eod)), (labels, mask)
        elif data.randomized_positions is not None:
            starts = torch.zeros_like(tokens)
            if places is not None:
                starts += torch.arange(tokens.shape[1], device=device) - next(places).to(device)
            yield (tokens, starts), (labels, mask)
        else:
            yield tokens, (labels, mask)
