"""Which samples a rank reads, and when; a function of the step alone.

One training step takes ``global_batch`` samples in order; accumulation steps and ranks share them
as in NeoX. With two ranks, micro-batches of 2 and 2 accumulation steps::

    sample     0  1  2  3  4  5  6  7 | 8 ...
    micro step 0  0  0  0  1  1  1  1 | 0 ...
    rank       0  0  1  1  0  0  1  1 | 0 ...

The set of samples in a step depends on the global batch only, so a run may stop after any step
and go on with another number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from megatron.data.errors import DataError

__all__ = ["ResumableBatchSampler"]


class ResumableBatchSampler:
    """Yields the sample numbers of each micro-batch of one data-parallel rank.

    ``at_end`` says what follows the last whole global batch: ``"error"`` (the loader raises a
    ``DataError``), ``"stop"`` (iteration ends) or ``"wrap"`` (start again at sample 0).
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
        at_end: Literal["error", "stop", "wrap"] = "error",
    ) -> None:
        if min(total_samples, micro_batch_size, dp_size, grad_accum) < 1:
            raise DataError(
                f"total_samples {total_samples}, micro_batch_size {micro_batch_size}, dp_size "
                f"{dp_size} and grad_accum {grad_accum} must all be at least 1"
            )
        if not 0 <= dp_rank < dp_size:
            raise DataError(f"dp_rank {dp_rank} is not below dp_size {dp_size}")
        self.total_samples = total_samples
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.grad_accum = grad_accum
        self.at_end = at_end
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
        while self.at_end == "wrap" or start + self.global_batch <= self.total_samples:
            for micro_step in range(self.grad_accum):
                yield self.micro_batch(start // self.global_batch, micro_step)
            start += self.global_batch

    def micro_batch(self, step: int, micro_step: int) -> list[int]:
        """The samples of this rank in one micro-step of one training step."""
        first = step * self.global_batch
        first += (micro_step * self.dp_size + self.dp_rank) * self.micro_batch_size
        return [i % self.total_samples for i in range(first, first + self.micro_batch_size)]
