"""Batches of torch tensors from a dataset and a sampler."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from megatron.data.gpt_dataset import Sample
from megatron.errors import DataError

Batch = dict[str, torch.Tensor]


def collate(samples: Sequence[Sample]) -> Batch:
    """``{"text": int64[micro_batch, length + 1]}``."""
    return {"text": torch.from_numpy(np.stack([sample["text"] for sample in samples]))}


def build_data_loader(
    dataset: Any,
    sampler: ResumableBatchSampler,
    num_workers: int = 0,
    pin_memory: bool = False,
    seed: int = 0,
) -> Iterator[Batch]:
    """The micro-batches of this rank, in order; a clear error once there are no more.

    The sampler cannot raise that error itself: ``num_workers`` processes read ahead of the training
    loop, and would stop it before its last steps.
    """
    yield from DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        pin_memory=pin_memory,
        collate_fn=collate,
        prefetch_factor=4 if num_workers else None,
        # Else every start would draw a seed from the stream that dropout uses, and a resumed run
        # would not continue it.
        generator=torch.Generator().manual_seed(seed),
    )
    raise DataError(
        f"all {sampler.total_samples} samples have been used; more steps need a dataset built for "
        "more samples (train_iters, or eval_iters for validation)"
    )


# Which samples a rank reads at each step; a function of the step alone.
#
# One training step takes ``global_batch`` samples in order; accumulation steps and ranks share them
# as in NeoX. With two ranks, micro-batches of 2 and 2 accumulation steps::
#
#     sample     0  1  2  3  4  5  6  7 | 8 ...
#     micro step 0  0  0  0  1  1  1  1 | 0 ...
#     rank       0  0  1  1  0  0  1  1 | 0 ...
#
# The set of samples in a step depends on the global batch only, so a run may stop after any step
# and go on with another number of ranks.


class ResumableBatchSampler:
    """Yields the sample numbers of each micro-batch of one data-parallel rank.

    After the last whole global batch it starts again at sample 0 if it may ``wrap``; otherwise the
    loader raises a ``DataError``.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int = 0,
        micro_batch_size: int = 1,
        dp_rank: int = 0,
        dp_size: int = 1,
        grad_accum: int = 1,
        *,
        wrap: bool = False,
    ) -> None:
        self.total_samples = total_samples
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.grad_accum = grad_accum
        self.wrap = wrap
        if consumed_samples < 0 or consumed_samples % self.global_batch:
            raise DataError(
                f"consumed_samples {consumed_samples} is not a whole number of global batches of "
                f"{self.global_batch}; resume with the same global batch size"
            )
        self.consumed_samples = consumed_samples

    @property
    def global_batch(self) -> int:
        return self.micro_batch_size * self.dp_size * self.grad_accum

    def __len__(self) -> int:
        """Micro-batches left before the end (of the first pass, when wrapping)."""
        left = max(0, self.total_samples - self.consumed_samples)
        return left // self.global_batch * self.grad_accum

    def __iter__(self) -> Iterator[list[int]]:
        start = self.consumed_samples
        while self.wrap or start + self.global_batch <= self.total_samples:
            for micro_step in range(self.grad_accum):
                first = start + (micro_step * self.dp_size + self.dp_rank) * self.micro_batch_size
                yield [i % self.total_samples for i in range(first, first + self.micro_batch_size)]
            start += self.global_batch


# From a batch of text to model inputs, labels and the mask of counted positions.


def get_labels_and_mask(
    text: torch.Tensor,
    eod: int,
    eod_mask_loss: bool = False,
    label: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [B, L], labels [B, L] and loss mask [B, L] (fp32) from text [B, L + 1].

    With ``eod_mask_loss`` positions whose input is the end of a document do not count, because
    the next document cannot be foreseen. With a ``label`` [B, L + 1] for each token of the text,
    those below 0 do not count.
    """
    tokens = text[:, :-1].contiguous()
    labels = (text if label is None else label)[:, 1:].contiguous()
    loss_mask = torch.ones(tokens.shape, dtype=torch.float32, device=text.device)
    if label is not None:
        loss_mask[labels < 0] = 0.0
        labels = labels.clamp(min=0)
    if eod_mask_loss:
        loss_mask[tokens == eod] = 0.0
    return tokens, labels, loss_mask


def drawn_positions(seed: int, sample: int, length: int, most: int) -> torch.Tensor:
    """The positions of a training sample, [length]: drawn from `most`, sorted, none twice.

    They depend on the seed and on the sample's number in training, not on ranks or restarts.
    """
    key = hashlib.sha256(f"{seed}/positions/{sample}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "little"))
    return torch.randperm(most, generator=generator)[:length].sort().values


def document_starts(tokens: torch.Tensor, eod: int) -> torch.Tensor:
    """Where each token's document begins, [B, L]: after the last end of a document before it."""
    begins = torch.zeros_like(tokens)
    begins[:, 1:] = tokens[:, :-1] == eod
    return (begins * torch.arange(tokens.shape[1], device=tokens.device)).cummax(-1).values
