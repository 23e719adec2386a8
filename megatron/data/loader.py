"""Batches of torch tensors from a dataset and a sampler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from megatron.data.errors import DataError
from megatron.data.gpt_dataset import Sample, SampleDataset
from megatron.data.sampler import ResumableBatchSampler

__all__ = ["BatchLoader", "ResumableBatchSampler", "build_data_loader", "collate"]

Batch = dict[str, torch.Tensor]


def collate(samples: Sequence[Sample]) -> Batch:
    """``{"text": int64[micro_batch, length + 1]}``."""
    return {"text": torch.from_numpy(np.stack([sample["text"] for sample in samples]))}


class BatchLoader(DataLoader[Batch]):
    """A DataLoader that says clearly when it ran out of samples.

    The sampler cannot raise that error itself: workers read ahead of the training loop, and would
    stop it before its last steps.
    """

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        yield from super().__iter__()
        sampler = self.batch_sampler
        if isinstance(sampler, ResumableBatchSampler) and sampler.at_end == "error":
            raise DataError(
                f"all {sampler.total_samples} samples have been used; more steps need a dataset "
                "built for more samples (train_iters, or eval_iters for validation)"
            )


def build_data_loader(
    dataset: SampleDataset,
    sampler: ResumableBatchSampler,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> BatchLoader:
    """The micro-batches of this rank, in order, read by ``num_workers`` processes."""
    options: dict[str, Any] = {}
    if num_workers > 0:
        options = {"prefetch_factor": 4, "persistent_workers": False}
    return BatchLoader(
        dataset,  # type: ignore[arg-type]  # any object with length and items will do
        batch_sampler=sampler,
        num_workers=num_workers,
        pin_memory=pin_memory,
        collate_fn=collate,
        **options,
    )
