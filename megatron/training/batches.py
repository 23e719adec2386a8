"""Endless iterators of micro-batches for training, validation and test."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from megatron.data.datasets import build_datasets, sample_counts
from megatron.data.loader import ResumableBatchSampler, build_data_loader, get_labels_and_mask
from megatron.mpu import ParallelState
from megatron.training.stepper import MicroBatch

if TYPE_CHECKING:
    from megatron.neox_arguments import BatchPlan, NeoXArgs

Streams = tuple[
    Iterator[MicroBatch] | None, Iterator[MicroBatch] | None, Iterator[MicroBatch] | None
]


def build_streams(
    args: NeoXArgs,
    plan: BatchPlan,
    parallel: ParallelState,
    *,
    eod: int,
    vocab_size: int,
    start_step: int,
) -> Streams:
    """Training data from step `start_step` on; validation and test from where they would be."""
    iterations = args.optimization.train_iters or 0
    evaluation = args.evaluation
    datasets = build_datasets(
        args.data,
        seq_length=args.model.seq_length,
        seq_length_val=args.model.seq_length_val,
        num_samples=sample_counts(
            iterations, evaluation.eval_interval, evaluation.eval_iters, plan.train_batch_size
        ),
        seed=args.runtime.seed if args.data.data_seed is None else args.data.data_seed,
        vocab_size=vocab_size,
    )
    evaluations_done = start_step // evaluation.eval_interval
    starts = (start_step, evaluations_done * evaluation.eval_iters, 0)
    streams = [
        None
        if dataset is None or len(dataset) == 0
        else _stream(dataset, start, plan, parallel, args, eod, wrap=i > 0)
        for i, (dataset, start) in enumerate(zip(datasets, starts, strict=True))
    ]
    return streams[0], streams[1], streams[2]


def _stream(
    dataset: Any,
    start: int,
    plan: BatchPlan,
    parallel: ParallelState,
    args: NeoXArgs,
    eod: int,
    *,
    wrap: bool,
) -> Iterator[MicroBatch]:
    sampler = ResumableBatchSampler(
        total_samples=len(dataset),
        consumed_samples=start * plan.train_batch_size,
        micro_batch_size=plan.micro_batch_size,
        dp_rank=parallel.dp_rank,
        dp_size=parallel.dp_size,
        grad_accum=plan.gradient_accumulation_steps,
        at_end="wrap" if wrap else "error",
    )
    loader = build_data_loader(
        dataset,
        sampler,
        num_workers=args.data.num_workers if not wrap else 0,
        pin_memory=torch.cuda.is_available(),
    )
    # Else every start would draw a seed from the stream that dropout uses, and a resumed run
    # would not continue it.
    loader.generator = torch.Generator().manual_seed(args.runtime.seed)
    return _micro_batches(loader, eod, args.data.eod_mask_loss)


def _micro_batches(
    loader: Iterable[dict[str, torch.Tensor]], eod: int, eod_mask_loss: bool
) -> Iterator[MicroBatch]:
    for batch in loader:
        tokens, labels, mask = get_labels_and_mask(batch["text"], eod, eod_mask_loss)
        yield tokens, (labels, mask)
